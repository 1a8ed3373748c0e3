"""Where this process stands among the others: its mesh, its place in it, its process groups.

Every process of a run executes the same program. torchrun tells each one its rank through the environment; the profile
says how the ranks are arranged over the axes (dp, bp, tp), tp varying fastest so that a tensor-parallel group sits on
adjacent devices. An engine calls `init_mesh` once, before it loads anything.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from common.config import DeviceProfile, MeshConfig
from common.decoding import Relay
from common.errors import ConfigError, EngineError, first_line
from common.platforms import GroupBackends, platform_of
from common.processes.ranks import global_rank, is_launched, num_started
from common.processes.relay import ReplicaRelay

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

AXES = ("dp", "bp", "tp")
_START_MANY = "start as many processes"


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place. A group is None where its axis has one rank, and the relay where the replica has: there is
    nobody to talk to."""

    dp_rank: int = 0
    dp_size: int = 1
    bp_rank: int = 0
    bp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    rank: int = 0
    bp_group: ProcessGroup | None = None
    tp_group: ProcessGroup | None = None
    relay: Relay | None = None

    @property
    def world_size(self) -> int:
        return self.dp_size * self.bp_size * self.tp_size

    @property
    def is_leader(self) -> bool:
        """The one rank of its replica that writes results."""
        return self.bp_rank == 0 and self.tp_rank == 0


def resolve_mesh(profile: DeviceProfile) -> MeshConfig:
    """Return the profile's mesh. `auto` takes every started process, or before a launch every device this node can
    see."""
    if isinstance(profile.mesh, MeshConfig):
        return profile.mesh
    platform = platform_of(profile)
    num_processes = num_started() if is_launched() else max(1, platform.num_visible_devices())
    tensor_parallel = platform.auto_tensor_parallel_size
    if num_processes % tensor_parallel:
        tensor_parallel = 1
    mesh = MeshConfig(branch_parallel_size=num_processes // tensor_parallel, tensor_parallel_size=tensor_parallel)
    logger.info("profile %s: mesh auto is bp%d tp%d", profile.name, mesh.branch_parallel_size, tensor_parallel)
    return mesh


def check_started(profile: DeviceProfile, remedy: str = _START_MANY) -> MeshConfig:
    """Return the mesh, if as many processes were started as it has. Raises ConfigError naming both numbers, and the
    remedy."""
    sizes = resolve_mesh(profile)
    if num_started() != sizes.num_processes:
        raise ConfigError(
            f"profile {profile.name} wants {sizes.num_processes} processes "
            f"(dp {sizes.data_parallel_size} x bp {sizes.branch_parallel_size} x tp {sizes.tensor_parallel_size}) "
            f"but {num_started()} {'was' if num_started() == 1 else 'were'} started: "
            f"{remedy}, or change mesh in the profile"
        )
    return sizes


def init_mesh(profile: DeviceProfile, backends: GroupBackends, timeout_s: float | None = None) -> Mesh:
    """Join the run's processes; blocks until all have come. Raises ConfigError if the profile wants another number.

    The caller has already made its accelerator current. No process group exists where the mesh has one process.
    timeout_s: of collectives while the engine starts, where that is not collective_timeout_s.
    """
    sizes = check_started(profile)
    if sizes.num_processes == 1:
        return Mesh()
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    timeout = timedelta(seconds=profile.collective_timeout_s)
    shape = (sizes.data_parallel_size, sizes.branch_parallel_size, sizes.tensor_parallel_size)
    override: Any = None if backends.axes is None else dict.fromkeys(AXES, backends.axes)
    try:
        dist.init_process_group(
            backends.default, timeout=timeout if timeout_s is None else timedelta(seconds=timeout_s)
        )
        device_mesh = init_device_mesh(profile.device, shape, mesh_dim_names=AXES, backend_override=override)
        relay = _relay(sizes, timeout)
    except (RuntimeError, ValueError) as error:
        problem = f"rank {global_rank()}: could not join the other processes over {backends.default}"
        raise EngineError(f"{problem}: {first_line(error)}") from error
    return _place(device_mesh, sizes, relay)


def _relay(sizes: MeshConfig, timeout: timedelta) -> Relay | None:
    """Make the relay of this rank's replica."""
    num_ranks = sizes.branch_parallel_size * sizes.tensor_parallel_size
    if num_ranks == 1:
        return None
    return ReplicaRelay(host_group(num_ranks, timeout), global_rank(), is_first=global_rank() % num_ranks == 0)


def host_group(num_ranks: int, timeout: timedelta) -> ProcessGroup:
    """Return a group over the hosts' network of this rank and its neighbours: `num_ranks` adjacent ones. Every rank
    makes the groups of all, in one order."""
    import torch.distributed as dist

    groups = [
        dist.new_group(list(range(first, first + num_ranks)), timeout=timeout, backend="gloo")
        for first in range(0, num_started(), num_ranks)
    ]
    mine: ProcessGroup = groups[global_rank() // num_ranks]
    return mine


def _place(device_mesh: Any, sizes: MeshConfig, relay: Relay | None) -> Mesh:
    dp_rank, bp_rank, tp_rank = device_mesh.get_coordinate()
    return Mesh(
        dp_rank=dp_rank,
        dp_size=sizes.data_parallel_size,
        bp_rank=bp_rank,
        bp_size=sizes.branch_parallel_size,
        tp_rank=tp_rank,
        tp_size=sizes.tensor_parallel_size,
        rank=global_rank(),
        bp_group=device_mesh.get_group("bp") if sizes.branch_parallel_size > 1 else None,
        tp_group=device_mesh.get_group("tp") if sizes.tensor_parallel_size > 1 else None,
        relay=relay,
    )


def close_mesh() -> None:
    """Leave the process groups, if there are any."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
