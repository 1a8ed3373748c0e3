"""Answers that are held to a format, between a pass and the loops."""

from common.decoding.scheduling.held.answer import Held, Pass, Workspaces
from common.decoding.scheduling.held.threads import Threads

__all__ = ["Held", "Pass", "Threads", "Workspaces"]
