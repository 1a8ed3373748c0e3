"""`scripts/run_batch.sh` and its sisters behind their first lines: check the files, then start the processes that the
profile asks for.

    python -m common.commands.job run PROFILE RUN [--set key=value ...] [options of `lopa run`]

One process is started directly; several go through torchrun, on this node or on NNODES of them. What is printed under
DRY_RUN=true is what is started, except that torchrun's own main is called in this process: its end can then be reported
as one sentence, with the message of the rank that failed first, instead of its stack trace and table.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.main import get_command

from common.batch import check_input, input_and_output
from common.commands import bench
from common.commands.main import app
from common.config import DeviceProfile, RunConfig, find_config, load_profile_and_run, load_sweep
from common.errors import ConfigError, MissingCapability, one_line
from common.platforms import platform_of
from common.processes import Nodes, processes_here, resolve_mesh, supervise, torchrun_options

_HELP = {"-h", "--help"}
_USAGE_ERROR: Any = typer.BadParameter.__base__  # click's, which late versions of typer bring along


@dataclass(frozen=True, slots=True)
class Job:
    """What this node starts: `worker` is the Python command line of one process, `torchrun` how several are started.

    needs_input: whether the command decodes the run's input.
    """

    environment: dict[str, str]
    worker: list[str]
    needs_input: bool
    torchrun: list[str] = field(default_factory=list)
    nodes: Nodes = field(default_factory=Nodes)

    @property
    def command(self) -> list[str]:
        launcher = ["-m", "torch.distributed.run", *self.torchrun] if self.torchrun else []
        return [sys.executable, *launcher, *self.worker]

    def script(self) -> str:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return "\n".join([*exports, shlex.join(self.command)])


def plan_job(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Job, DeviceProfile, RunConfig]:
    """What to start for `command PROFILE RUN ...` in this environment. Raises ConfigError."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)  # --help is the worker's
    parser.add_argument("command", choices=("run", "serve", "evaluate", "bench"), help=argparse.SUPPRESS)
    parser.add_argument("profile", help="device profile: a YAML file, or the name of one in configs/profiles")
    parser.add_argument("run", help="run file: a YAML file, or the name of one in configs/runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    known, others = parser.parse_known_args(arguments)
    profile_path, run_path = find_config("profiles", known.profile), find_config("runs", known.run)
    profile, run = load_profile_and_run(profile_path, run_path, known.set)
    settings = [item for override in known.set for item in ("--set", override)]
    profile_option = [] if known.command == "bench" else ["--profile"]
    files = [*profile_option, str(profile_path), str(run_path)]
    if not _HELP & set(others):
        _check_options(known.command, [*files, *others, *settings], run)
    worker = ["-m", "common.commands", known.command, *files, *others, *settings]
    nodes = Nodes.from_environment(environment)
    num_here = processes_here(profile, nodes)
    variables = {"OMP_NUM_THREADS": str(max(1, _num_cpus() // num_here)), **profile.environment}
    added = {name: value for name, value in variables.items() if name not in environment}
    needs_input = known.command in ("run", "evaluate")
    if num_here * nodes.count == 1:
        return Job(added, worker, needs_input), profile, run
    return Job(added, worker, needs_input, torchrun_options(nodes, num_here), nodes), profile, run


def _check_options(command: str, arguments: list[str], run: RunConfig) -> None:
    """Once, what every process would find wrong with its own command line. Raises ConfigError; argparse's own end."""
    if command == "bench":
        bench.parse(arguments)
        return
    parser: Any = get_command(app)
    try:
        parsed = parser.commands[command].make_context(command, list(arguments)).params
    except _USAGE_ERROR as error:
        raise ConfigError(f"{command}: {error.format_message()}") from None
    if "sweep" in parsed:
        load_sweep(find_config("sweeps", parsed["sweep"]), run.decode)


def check_before_start(profile: DeviceProfile, run: RunConfig, nodes: Nodes, *, needs_input: bool) -> None:
    """What can be known to fail before any process is started. Raises ConfigError or MissingCapability."""
    # Here: what is only printed under DRY_RUN has no reason to load torch.
    from common.checkpoint import check_tensor_parallel, load_model_config

    wanted, platform = processes_here(profile, nodes), platform_of(profile)
    if platform.needs_devices_at_start:
        platform.require_devices(profile, wanted)
    if needs_input:
        source, _ = input_and_output(run)
        check_input(source, wanted * nodes.count)
    check_tensor_parallel(load_model_config(run.model), resolve_mesh(profile).tensor_parallel_size)
    platform.require_devices(profile, wanted)


def main(arguments: Sequence[str]) -> int:
    """The exit code. Checks and torchrun's own imports take seconds, in which Ctrl-C is an end like any other."""
    try:
        return _check_and_start(arguments)
    except KeyboardInterrupt:
        print("lopa: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _check_and_start(arguments: Sequence[str]) -> int:
    # With torch-npu installed but no CANN, importing torch would fail with torch-npu's traceback.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        job, profile, run = plan_job(arguments, os.environ)
        if os.environ.get("DRY_RUN", "").lower() in ("1", "true", "yes"):
            print(job.script())
            return 0
        if _HELP & set(arguments):
            os.execv(sys.executable, [sys.executable, *job.worker])
        check_before_start(profile, run, job.nodes, needs_input=job.needs_input)
    except (ConfigError, MissingCapability, OSError) as error:
        print(f"lopa: {one_line(str(error))}", file=sys.stderr)
        return 2
    os.environ.update(job.environment)
    if not job.torchrun:
        # In place: a signal to this process, kill -9 too, is one to the worker.
        os.execv(sys.executable, job.command)
    return supervise(job.torchrun + job.worker, job.nodes.rank, job.nodes.count, job.nodes.address, job.nodes.port)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
