"""`scripts/sweep.sh` after its first lines: all points of a sweep checked, then launch after launch started.

    python -m common.commands.job evaluate [PROFILE RUN] SWEEP [--row NAME ...] [--retries N] [--set key=value ...]
                                           [options of `lopa evaluate`]

A launch is `lopa evaluate` over the points that share a model and a profile, in processes of its own. Where a point
fails, the rest of its launch is started anew without it; what has failed is tried again at the end. Nothing is skipped
in silence: the exit code is 0 only if every point is done. On several nodes a failure ends all of it, and the next
start goes on there.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.batch import check_input, input_and_output
from common.commands.arguments.options import Parser, allowing
from common.commands.job.launch import Job, check_before_start, check_options, is_dry_run, job_of, start_here
from common.config import OWN, Sweep, SweepLaunch, find_config, load_sweep, slug
from common.errors import ConfigError, one_line, placed
from common.processes import die_with_parent, log_to_stderr, processes_here, read_error_file, restored_signals, say

logger = logging.getLogger(__name__)
_ONE_LAUNCH = "LOPA_ONE_LAUNCH"  # set for the process that stands for one launch of a sweep
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
_STOPS = (128 + signal.SIGINT, 128 + signal.SIGTERM)


class Outcome(NamedTuple):
    """The end of a launch. sentence: what its processes said last; None: nothing."""

    exit_code: int
    sentence: str | None


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep, and how its launches are started. options: of `lopa evaluate`, for all of them."""

    sweep: Sweep
    sweep_path: Path
    options: tuple[str, ...]
    retries: int

    def arguments(self, launch: SweepLaunch, names: Sequence[str]) -> list[str]:
        """PROFILE, RUN, SWEEP and options of a launch with these of its points."""
        first = launch.points[0]
        rows = [] if len(names) == len(self.sweep.names) else [word for name in names for word in ("--row", name)]
        return [str(first.profile_path), str(first.run_path), str(self.sweep_path), *rows, *self.options]

    def job(self, launch: SweepLaunch, environment: Mapping[str, str]) -> Job:
        """Raises ConfigError."""
        profile, *rest = self.arguments(launch, [point.name for point in launch.points])
        worker = ["-m", "common.commands", "evaluate", "--profile", profile, *rest]
        return job_of(worker, launch.profile, environment, needs_input=True)

    def script(self, environment: Mapping[str, str]) -> str:
        """What is started, launch by launch, as lines of a shell."""
        parts = []
        for launch in self.sweep.launches:
            lines = self.job(launch, environment).script()
            title = one_line(f"# {', '.join(point.name for point in launch.points)}")
            parts.append(f"{title}\n{lines}" if len(self.sweep.launches) == 1 else f"{title}\n(\n{lines}\n)")
        return "\n".join(parts)


def plan_sweep(arguments: Sequence[str]) -> SweepPlan:
    """Raises ConfigError for what is wrong with any point, before one is started."""
    parser = Parser(prog="sweep.sh", allow_abbrev=False, add_help=False)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--allow-code-execution", action="store_true")
    parser.add_argument("--row", action="append", default=[])
    parser.add_argument("--retries", default="1")
    parser.add_argument("--show")
    known, others = parser.parse_known_args(arguments)
    if len(known.files) not in (1, 3):
        raise ConfigError("evaluate: give PROFILE RUN SWEEP, or only SWEEP if that names a profile and a run")
    if not (known.retries.isdecimal() and len(known.retries) < 10):
        raise ConfigError(
            f"--retries {known.retries[:80]}: give a whole number, how often a failed point is tried again"
        )
    profile, run, name = known.files if len(known.files) == 3 else (OWN, OWN, known.files[0])
    known.set = allowing(known.set, known.allow_code_execution)
    settings = [word for override in known.set for word in ("--set", override)]
    options = [*others, *(["--show", known.show] if known.show is not None else []), *settings]
    path = find_config("sweeps", name)
    check_options("evaluate", ["--profile", profile, run, str(path), *options])
    return SweepPlan(
        load_sweep(path, profile, run, known.set, known.row), path, tuple(options), retries=int(known.retries)
    )


def start(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code. Raises ConfigError, MissingCapability or OSError before any point is decoded."""
    plan = plan_sweep(arguments)
    if is_dry_run(environment):
        print(plan.script(environment))
        return 0
    jobs = [plan.job(launch, environment) for launch in plan.sweep.launches]
    if _ONE_LAUNCH in environment:
        return start_here(jobs[0])
    for launch, job in zip(plan.sweep.launches, jobs, strict=True):
        check_launch(plan.sweep_path, launch, job)
    log_to_stderr(level=logging.INFO)
    run = run_on_nodes if jobs[0].nodes.count > 1 else run_sweep
    return run(plan, partial(start_launch, plan))


def check_launch(sweep: Path, launch: SweepLaunch, job: Job) -> None:
    """Check what can be known to fail of any of its points. Raises ConfigError or MissingCapability."""
    with placed(f"{sweep}: row {launch.points[0].name!r}"):
        check_before_start(launch.profile, launch.points[0].run, job.nodes, needs_input=True)
    # Here: what is only printed under DRY_RUN has no reason to load torch.
    from common.generate import check_settings

    checked = {launch.points[0].run.input}
    for point in launch.points:
        source, _ = input_and_output(point.run)
        if source not in checked:
            with placed(f"{sweep}: row {point.name!r}"):
                check_input(source, processes_here(launch.profile, job.nodes) * job.nodes.count)
            checked.add(source)
    with placed(sweep):
        check_settings({point.name: point.run.decode for point in launch.points}, launch.profile, launch.run)


def run_sweep(plan: SweepPlan, start_launch: Callable[[SweepLaunch, Sequence[str]], Outcome]) -> int:
    """Every point until it is done or has failed `retries` times more; the exit code.

    Raises ConfigError where the board cannot be written, and for a full disk, which no retry helps.
    """
    from common.evaluation import Board, print_board

    board, names = Board(plan.sweep), [point.name for point in plan.sweep.points]
    board.begin(plan.sweep.points)
    num_started = 0
    for attempt in range(1 + plan.retries):
        for launch in plan.sweep.launches:
            left = board.left([point.name for point in launch.points])
            if left and attempt:
                logger.info("trying again what has failed: %s", ", ".join(left))
            cause: str | None = None
            while left:
                num_started += 1
                outcome = start_launch(launch, left)
                if outcome.exit_code in _STOPS:
                    return outcome.exit_code
                left, cause = _after_failed(board, left, outcome, cause)
    if num_started > 1:
        print_board(board)
    return _end(board, names)


def run_on_nodes(plan: SweepPlan, start_launch: Callable[[SweepLaunch, Sequence[str]], Outcome]) -> int:
    """The same on every node, launch by launch; the first failure ends it everywhere."""
    for launch in plan.sweep.launches:
        outcome = start_launch(launch, [point.name for point in launch.points])
        if outcome.exit_code:
            return outcome.exit_code
    return 0


def _after_failed(
    board: Any, names: Sequence[str], outcome: Outcome, cause_before: str | None
) -> tuple[list[str], str | None]:
    """Points of a launch that are still to be tried, and why one of them has failed, if one has.

    They are decoded in their order, so the first that is not done is the one that failed. Two that fail of one cause
    in a row, such as a model that cannot be loaded, are enough: the others fail of it unseen, and say so.
    """
    left = board.left(names)
    if not left:
        return [], None
    name, *others = left
    row = board.row(name)
    if row["status"] != "failed":  # its process had no time to say so
        board.fail(name, outcome.sentence or _ending(outcome.exit_code))
        row = board.row(name)
    sentence = row["error"]
    if any(words in sentence for words in _NO_ROOM):
        raise ConfigError(f"{name}: {sentence}; what is decoded is kept: make room and start again")
    logger.error("%s failed: %s", name, sentence)
    cause = sentence.replace(slug(name), "")
    if others and left == [*names] and cause == cause_before:
        for other in others:
            board.fail(other, f"not tried, since the two before it failed: {sentence}")
        return [], cause
    return others, cause


def _end(board: Any, names: Sequence[str]) -> int:
    left = board.left(names)
    if not left:
        return 0
    error_of = {row["name"]: row["error"] for row in board.rows()}
    reasons = "; ".join(f"{name}: {error_of[name]}" for name in left)
    say(one_line(f"{len(left)} of {len(names)} points failed ({reasons})"))
    say("start it again to try them once more; what is done stays")
    return 2


def _ending(exit_code: int) -> str:
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number not in {int(one) for one in signal.Signals}:
        return f"its processes ended with exit code {exit_code}"
    name = signal.Signals(number).name
    return f"killed by {name}{'; the system does that when memory runs out' if name == 'SIGKILL' else ''}"


def start_launch(plan: SweepPlan, launch: SweepLaunch, names: Sequence[str]) -> Outcome:
    """Start a launch in processes of its own and wait for it. They end when this process does, however it ends."""
    command = [sys.executable, "-m", "common.commands.job", "evaluate", *plan.arguments(launch, names)]
    with tempfile.TemporaryDirectory(prefix="lopa-sweep-") as folder:
        said = Path(folder) / "error.json"
        environment = {**os.environ, _ONE_LAUNCH: "1", "TORCHELASTIC_ERROR_FILE": str(said)}
        # A session of its own: a Ctrl-C of the terminal comes once, from here.
        process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=die_with_parent)
        return Outcome(_wait(process), read_error_file(said))


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code; signals of this process are handed on."""
    with restored_signals() as numbers:
        for number in numbers:
            signal.signal(number, lambda got, _: process.send_signal(got))
        return process.wait()
