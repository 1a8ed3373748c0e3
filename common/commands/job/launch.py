"""What one node starts for a command: the command line and the environment of its processes, and what is checked before
any of them begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.main import get_command

from common.batch import check_input, input_and_output
from common.commands.bench import steps
from common.commands.main import app
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError, as_shell
from common.platforms import platform_of
from common.processes import Nodes, check_threads, injected, processes_here, resolve_mesh, supervise, torchrun_options

_USAGE_ERROR: Any = typer.BadParameter.__base__  # click's, which late versions of typer bring along


@dataclass(frozen=True, slots=True)
class Job:
    """A command as this node starts it: `worker` is the Python command line of one process, `torchrun` how
    several are started.

    needs_input: whether the command decodes the run's input. dropped: variables of a pod, not of these processes.
    num_here: processes on each node.
    is_on_ray: whether the devices are those of processes that Ray starts, maybe elsewhere.
    """

    environment: dict[str, str]
    worker: list[str]
    needs_input: bool
    torchrun: list[str] = field(default_factory=list)
    nodes: Nodes = field(default_factory=Nodes)
    dropped: tuple[str, ...] = ()
    num_here: int = 1
    is_on_ray: bool = False

    @property
    def command(self) -> list[str]:
        launcher = ["-m", "torch.distributed.run", *self.torchrun] if self.torchrun else []
        return [sys.executable, *launcher, *self.worker]

    def script(self) -> str:
        exports = [f"export {name}={as_shell([value])}" for name, value in self.environment.items()]
        unset = [as_shell(["unset", *self.dropped])] if self.dropped else []
        return "\n".join([*unset, *exports, as_shell(self.command)])


def job_of(
    worker: list[str], profile: DeviceProfile, environment: Mapping[str, str], *, needs_input: bool,
    starts_others: bool = False,
) -> Job:  # fmt: skip
    """This node's share of a command that runs under the profile. Raises ConfigError.

    starts_others: the command is one process that starts those of the profile.
    """
    check_threads(environment)
    nodes = Nodes.from_environment(environment)
    num_here = processes_here(profile, nodes)
    variables = {"OMP_NUM_THREADS": str(max(1, _num_cpus() // num_here)), **profile.environment}
    added = {name: value for name, value in variables.items() if name not in environment}
    if starts_others and nodes.count > 1:
        raise ConfigError(
            "a server's replicas are on one node: unset NNODES, start a server on each node, and put a router in front "
            "(configs/cluster/nginx.conf)"
        )
    dropped = tuple(injected(environment))
    if starts_others or num_here * nodes.count == 1:
        return Job(added, worker, needs_input, dropped=dropped)
    return Job(added, worker, needs_input, torchrun_options(nodes, num_here), nodes, dropped, num_here)


def check_options(command: str, arguments: list[str]) -> None:
    """Check once what every process would find wrong with its command line. Raises ConfigError; argparse's errors
    exit."""
    if command == "bench":
        steps.parse(arguments)
        return
    parser: Any = get_command(app)
    try:
        parser.commands[command].make_context(command, list(arguments))
    except _USAGE_ERROR as error:
        raise ConfigError(f"{command}: {error.format_message()}") from None


def check_before_start(profile: DeviceProfile, run: RunConfig, nodes: Nodes, *, needs_input: bool) -> None:
    """Check what can be known to fail before any process is started. Raises ConfigError or MissingCapability."""
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


def start_here(job: Job) -> int:
    """Become the job's one process, or the launcher of several; the exit code."""
    for name in job.dropped:
        del os.environ[name]
    os.environ.update(job.environment)
    if not job.torchrun:
        # In place: a signal to this process, kill -9 too, is one to the worker.
        os.execv(sys.executable, job.command)
    return supervise(job.torchrun + job.worker, job.nodes, job.num_here)


_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def is_dry_run(environment: Mapping[str, str]) -> bool:
    """Whether commands are to be printed and nothing started. Raises ConfigError for what says neither."""
    given = environment.get("DRY_RUN", "").strip().lower()
    if given not in (*_YES, *_NO):
        raise ConfigError(f"DRY_RUN is {given!r}: set it to true, which prints what would start, or unset it")
    return given in _YES


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
