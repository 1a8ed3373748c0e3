"""`scripts/run_batch.sh` behind its first lines: check the files, then start the processes that the profile asks for.

    python -m common.job run PROFILE RUN [--set key=value ...] [options of `lopa run`]

One process is started directly; several go through torchrun, on this node or on NNODES of them. What is printed under
DRY_RUN=true is what is started, except that torchrun's own main is called in this process: its end can then be reported
as one sentence, with the message of the rank that failed first, instead of its stack trace and table.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.batch import input_and_output
from common.config import ConfigError, DeviceProfile, RunConfig, find_config, load_profile_and_run
from common.engine import MissingCapability
from common.inputs import read_lines
from common.launch import num_visible_devices, require_devices, resolve_mesh
from common.models.config import load_model_config


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a run, as the user's scheduler or shell describes them in the environment."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Nodes:
        count, rank = (_integer(environment, name, default) for name, default in (("NNODES", 1), ("NODE_RANK", 0)))
        if not 0 <= rank < count:
            raise ConfigError(f"NODE_RANK {rank} of {count} nodes: set it to 0 on the first node, 1 on the second, ...")
        if count == 1:
            return cls()
        if not environment.get("MASTER_ADDR"):
            raise ConfigError(f"NNODES is {count} but MASTER_ADDR is not set: set it to the first node's address")
        return cls(count, rank, environment["MASTER_ADDR"], _integer(environment, "MASTER_PORT", cls().port))


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r}: set it to a number")
    return int(text)


@dataclass(frozen=True, slots=True)
class Job:
    """What this node starts: `worker` is the Python command line of one process, `torchrun` how several are started."""

    environment: dict[str, str]
    worker: list[str]
    torchrun: list[str] = field(default_factory=list)
    nodes: Nodes = Nodes()

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
    parser.add_argument("command", choices=("run", "evaluate", "bench"), help=argparse.SUPPRESS)
    parser.add_argument("profile", help="device profile: a YAML file, or the name of one in configs/profiles")
    parser.add_argument("run", help="run file: a YAML file, or the name of one in configs/runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    known, others = parser.parse_known_args(arguments)
    profile_path, run_path = find_config("profiles", known.profile), find_config("runs", known.run)
    profile, run = load_profile_and_run(profile_path, run_path, known.set)
    settings = [item for override in known.set for item in ("--set", override)]
    options = ["--profile", str(profile_path), str(run_path), *others, *settings]
    if known.command == "bench":
        worker = ["-m", "common.bench", str(profile_path), str(run_path), *others, *settings]
    else:
        worker = ["-m", "common.cli", known.command, *options]
    nodes = Nodes.from_environment(environment)
    num_here = processes_here(profile, nodes)
    variables = {"OMP_NUM_THREADS": str(max(1, _num_cpus() // num_here)), **profile.environment}
    added = {name: value for name, value in variables.items() if name not in environment}
    if num_here * nodes.count == 1:
        return Job(added, worker), profile, run
    return Job(added, worker, _torchrun_options(nodes, num_here), nodes), profile, run


def processes_here(profile: DeviceProfile, nodes: Nodes) -> int:
    """Processes on each node. Raises ConfigError if the mesh does not spread over the nodes evenly."""
    if profile.mesh == "auto":
        return profile.processes_per_node or resolve_mesh(profile).num_processes
    wanted = resolve_mesh(profile).num_processes
    here = profile.processes_per_node or -(-wanted // nodes.count)
    if here * nodes.count != wanted:
        how = f"at {here} a node" if profile.processes_per_node else "the same number on each node"
        raise ConfigError(
            f"profile {profile.name} wants {wanted} processes, {how}, but NNODES is {nodes.count}: "
            f"set NNODES to {max(1, wanted // here)}, or change mesh or processes_per_node in the profile"
        )
    return here


def _torchrun_options(nodes: Nodes, num_here: int) -> list[str]:
    if nodes.count == 1:
        # Without --local-addr the rank's own host name is looked up, which takes minutes where DNS does not know it.
        where = ["--standalone", f"--local-addr={nodes.address}"]
    else:
        where = [f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}"]
        where += [f"--master-addr={nodes.address}", f"--master-port={nodes.port}"]
    return [*where, f"--nproc-per-node={num_here}", "--max-restarts=0", "--monitor-interval=0.2"]


def check_before_start(profile: DeviceProfile, run: RunConfig, nodes: Nodes, *, needs_input: bool) -> None:
    """What can be known to fail before any process is started. Raises ConfigError or MissingCapability."""
    from common.weights import check_tensor_parallel

    wanted = processes_here(profile, nodes)
    require_devices(profile, wanted)
    if needs_input:
        source, _ = input_and_output(run)
        read_lines(source)
    check_tensor_parallel(load_model_config(run.model), resolve_mesh(profile).tensor_parallel_size)
    if profile.device != "cuda":
        return
    visible = num_visible_devices(profile.device)
    if wanted > visible:
        raise ConfigError(
            f"profile {profile.name} wants {wanted} {profile.device} devices on this node, {visible} are visible: "
            "use a profile with a smaller mesh, or check CUDA_VISIBLE_DEVICES"
        )


def main(arguments: Sequence[str]) -> int:
    # With torch-npu installed but no CANN, importing torch would fail with torch-npu's traceback.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        job, profile, run = plan_job(arguments, os.environ)
        if os.environ.get("DRY_RUN", "").lower() in ("1", "true", "yes"):
            print(job.script())
            return 0
        if {"-h", "--help"} & set(arguments):
            os.execv(sys.executable, [sys.executable, *job.worker])
        check_before_start(profile, run, job.nodes, needs_input="common.cli" in job.worker)
    except (ConfigError, MissingCapability, OSError) as error:
        print(f"lopa: {error}", file=sys.stderr)
        return 2
    os.environ.update(job.environment)
    if not job.torchrun:
        # In place: a signal to this process, kill -9 too, is one to the worker.
        os.execv(sys.executable, job.command)
    from common.supervise import supervise

    return supervise(job.torchrun + job.worker, job.nodes.rank, job.nodes.count, job.nodes.address, job.nodes.port)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
