"""What the scripts start: the command line checked once, then the processes that a profile asks for."""

from common.commands.job.start import main, plan_job

__all__ = ["main", "plan_job"]
