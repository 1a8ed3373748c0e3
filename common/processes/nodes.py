"""The nodes of a run, and how many of its processes each one starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.config import DeviceProfile
from common.errors import ConfigError
from common.processes.mesh import resolve_mesh


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
        if not environment.get("NODE_RANK"):
            raise ConfigError(
                f"NNODES is {count} but NODE_RANK is not set: set it to 0 on the first node, 1 on the next"
            )
        if not environment.get("MASTER_ADDR"):
            raise ConfigError(f"NNODES is {count} but MASTER_ADDR is not set: set it to the first node's address")
        return cls(count, rank, environment["MASTER_ADDR"], _integer(environment, "MASTER_PORT", cls().port))


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r}: set it to a number")
    return int(text)


def processes_here(profile: DeviceProfile, nodes: Nodes) -> int:
    """Processes on each node. Raises ConfigError if the mesh does not spread over the nodes evenly."""
    wanted = resolve_mesh(profile).num_processes
    if profile.mesh == "auto":
        return wanted
    here = -(-wanted // nodes.count)
    if here * nodes.count != wanted:
        raise ConfigError(
            f"profile {profile.name} wants {wanted} processes, the same number on each node, but NNODES is "
            f"{nodes.count}: set NNODES to {max(1, wanted // here)}, or change mesh in the profile"
        )
    return here


def torchrun_options(nodes: Nodes, num_here: int) -> list[str]:
    if nodes.count == 1:
        # Without --local-addr the rank's own host name is looked up, which takes minutes where DNS does not know it.
        where = ["--standalone", f"--local-addr={nodes.address}"]
    else:
        where = [f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}"]
        where += [f"--master-addr={nodes.address}", f"--master-port={nodes.port}"]
    return [*where, f"--nproc-per-node={num_here}", "--max-restarts=0", "--monitor-interval=0.2"]
