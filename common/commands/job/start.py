"""`scripts/run_batch.sh` and its sisters after their first lines: check the files, then start the processes that the
profile asks for.

    python -m common.commands.job run PROFILE RUN [--set key=value ...] [options of `lopa run`]
    python -m common.commands.job run PROFILE RUN --ray ADDRESS [--replicas N]  one process here, the others are Ray's
    python -m common.commands.job evaluate [PROFILE RUN] SWEEP [options]        see `sweep`

One process is started directly; several go through torchrun, on this node or on NNODES of them. What is printed under
DRY_RUN=true is what is started, except that torchrun's own main is called in this process: its end can then be reported
as one sentence, with the message of the rank that failed first, instead of its stack trace and table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

from common.commands.arguments.found import load_both
from common.commands.arguments.options import HUB_KEYS, Parser, allowing
from common.commands.job import sweep
from common.commands.job.launch import Job, check_before_start, check_options, is_dry_run, job_of, start_here
from common.commands.main import open_standard_streams
from common.config import DeviceProfile, RunConfig, find_config
from common.errors import ConfigError, MissingCapability, what_failed
from common.hub import name_of
from common.processes import Stopped, say, write_error_file
from common.serving import starts_replicas

_HELP = {"-h", "--help"}


def plan_job(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Job, DeviceProfile, RunConfig]:
    """Plan what to start for `command PROFILE RUN ...` in this environment. Raises ConfigError."""
    parser = Parser(allow_abbrev=False, add_help=False)  # --help is the worker's
    parser.add_argument("command", choices=("run", "serve", "evaluate", "bench"), help=argparse.SUPPRESS)
    parser.add_argument("profile", help="device profile: a YAML file, or the name of one in configs/profiles")
    parser.add_argument("run", help="run file: a YAML file, or the name of one in configs/runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--allow-code-execution", action="store_true", help="mark answers that are programs")
    known, others = parser.parse_known_args(arguments)
    known.set = allowing(known.set, known.allow_code_execution)
    profile_path, run_path = find_config("profiles", known.profile), find_config("runs", known.run)
    is_told = is_dry_run(environment) or bool(_HELP & set(others))
    profile, run = load_both(str(profile_path), known.run, known.set, with_weights=not is_told)
    overrides = [*known.set, *_fetched(run)]
    settings = [item for override in overrides for item in ("--set", override)]
    files = ["--profile", str(profile_path), str(run_path)]
    if not _HELP & set(others):
        check_options(known.command, [*files, *others, *settings])
    command = ["bench", "steps"] if known.command == "bench" else [known.command]
    worker = ["-m", "common.commands", *command, *files, *others, *settings]
    if known.command == "run" and any(one.partition("=")[0] == "--ray" for one in others):
        return Job({}, worker, needs_input=True, is_on_ray=True), profile, run
    starts_others = known.command == "serve" and starts_replicas(profile, run)
    job = job_of(worker, profile, environment, needs_input=known.command == "run", starts_others=starts_others)
    return job, profile, run


def _fetched(run: RunConfig) -> list[str]:
    """Overrides by which the processes take what was fetched here, and ask no hub once more."""
    given = {key: getattr(run, key) for key in HUB_KEYS}
    return [f"{key}={json.dumps(folder)}" for key, folder in given.items() if folder is not None and name_of(folder)]


def main(arguments: Sequence[str]) -> int:
    """The exit code. Checks and torchrun's own imports take seconds, in which a signal is an end like any other."""
    open_standard_streams()
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _check_and_start(arguments)
    except (KeyboardInterrupt, Stopped) as end:
        stopped = end if isinstance(end, Stopped) else Stopped(signal.SIGINT)
        say(str(stopped))
        return stopped.exit_code


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def _check_and_start(arguments: Sequence[str]) -> int:
    # With torch-npu installed but no CANN, importing torch would fail with torch-npu's traceback.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        if arguments[0] == "evaluate" and not _HELP & set(arguments):
            return sweep.start(arguments[1:], os.environ)
        job, profile, run = plan_job(arguments, os.environ)
        if is_dry_run(os.environ):
            print(job.script())
            return 0
        if _HELP & set(arguments):
            os.execv(sys.executable, [sys.executable, *job.worker])
        if not job.is_on_ray:
            check_before_start(profile, run, job.nodes, needs_input=job.needs_input)
    except (ConfigError, MissingCapability, OSError) as error:
        sentence = what_failed(error)
        write_error_file(sentence)  # for who started this launcher
        say(sentence)
        return 2
    return start_here(job)
