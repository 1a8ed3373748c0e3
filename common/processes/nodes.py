"""The nodes of a run, and how many of its processes each one starts.

NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT describe them. Where they are not set, what operators of Kubernetes put
into a pod is read instead:

    AscendJob               RANK: the pod's number, WORLD_SIZE: all devices, LOCAL_WORLD_SIZE: this pod's
    PyTorchJob, Volcano     RANK: the pod's number, WORLD_SIZE: all pods
    Kubeflow's trainer      PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.config import DeviceProfile
from common.errors import ConfigError
from common.processes.mesh import resolve_mesh

_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a run, as the user's scheduler or shell describes them in the environment."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Nodes:
        """Raises ConfigError for a number that is none, and for what is missing."""
        environment = {**environment, **_of_pod(environment)}
        count, rank = (_integer(environment, name, default) for name, default in (("NNODES", 1), ("NODE_RANK", 0)))
        if count < 1:
            raise ConfigError(f"NNODES {count}: set it to how many nodes there are, or unset it for this one alone")
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
        port = _integer(environment, "MASTER_PORT", cls().port)
        if not 0 < port < 2**16:
            raise ConfigError(f"MASTER_PORT {port}: set it to a port from 1 to 65535, the same one on every node")
        return cls(count, rank, environment["MASTER_ADDR"], port)


def injected(environment: Mapping[str, str]) -> list[str]:
    """Names that are set and belong to a rank or to torchrun's own options: not for what is started here."""
    return sorted(name for name in environment if name in _OF_A_RANK or name.startswith("PET_"))


def _of_pod(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of nodes as the operator of several pods gives them; empty where the user has said NNODES."""
    if environment.get("NNODES"):
        return {}
    if environment.get("PET_NNODES"):
        count = _integer(environment, "PET_NNODES", 1)
    else:
        total, in_pod = _integer(environment, "WORLD_SIZE", 1), _integer(environment, "LOCAL_WORLD_SIZE", 1)
        count = total // in_pod if in_pod else 0
        if total > 1 and count * in_pod != total:
            raise ConfigError(
                f"WORLD_SIZE {total} of this pod is no multiple of its LOCAL_WORLD_SIZE {in_pod}, so that the number "
                "of pods is not known: set NNODES and NODE_RANK"
            )
    if count <= 1:
        return {}
    sources = {
        "NODE_RANK": ("NODE_RANK", "PET_NODE_RANK", "RANK"),
        "MASTER_ADDR": ("MASTER_ADDR", "PET_MASTER_ADDR"),
        "MASTER_PORT": ("MASTER_PORT", "PET_MASTER_PORT"),
    }
    found = {"NNODES": str(count)}
    for name, known in sources.items():
        given = next((one for one in known if environment.get(one)), None)
        if given is not None and name != "MASTER_ADDR":
            _integer(environment, given, 0)  # so that a sentence names the one that is set
        found[name] = environment.get(given or name, "")
    return found


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not (text.isdecimal() and len(text) < 10):
        raise ConfigError(f"{name} is {text[:80]!r}: set it to a number")
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
