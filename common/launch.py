"""Where this process stands among the others: which engine, which mesh, which rank, which process groups.

Every process of a run executes the same program. torchrun tells each one its rank through the environment; the profile
says how the ranks are arranged over the axes (dp, bp, tp), tp varying fastest so that a tensor-parallel group sits on
adjacent devices. An engine calls `init_mesh` once, before it loads anything.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

from common.config import ConfigError, DeviceProfile, MeshConfig
from common.engine import EngineError, MissingCapability

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_POLL_S = 0.2
AXES = ("dp", "bp", "tp")
_ENGINE_OF_DEVICE = {"cpu": "lopa_cuda", "cuda": "lopa_cuda", "npu": "lopa_ascend"}
# What a tensor-parallel group of `mesh: auto` takes on Ascend: two packages of two dies each.
_AUTO_TENSOR_PARALLEL = {"lopa_ascend": 4}


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place. A group is None where its axis has one rank: there is nobody to talk to."""

    dp_rank: int = 0
    dp_size: int = 1
    bp_rank: int = 0
    bp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    rank: int = 0
    local_rank: int = 0
    bp_group: ProcessGroup | None = None
    tp_group: ProcessGroup | None = None

    @property
    def world_size(self) -> int:
        return self.dp_size * self.bp_size * self.tp_size

    @property
    def is_leader(self) -> bool:
        """The one rank of its replica that writes results."""
        return self.bp_rank == 0 and self.tp_rank == 0


def global_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_started() -> int:
    """Processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_visible_devices(device: str) -> int:
    """Devices of this kind that this node can see; `cpu` counts as one."""
    if device == "cpu":
        return 1
    if device == "npu":
        # By name, as engines are: what imports torch_npu stands above this package.
        count: int = import_module("lopa_ascend.ops").num_visible_devices()
        return count
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type == device else 0


def require_devices(profile: DeviceProfile, num_here: int | None = None) -> None:
    """Raises MissingCapability where an npu profile's devices cannot be used on this node, and says what is missing.

    num_here: processes of this node, if something else than the launcher or the profile knows it.
    """
    if profile.device != "npu":
        return
    if num_here is None:
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or profile.processes_per_node
    # By name, as engines are: what imports torch_npu stands above this package.
    import_module("lopa_ascend.ops").require_devices(num_here or resolve_mesh(profile).num_processes)


def resolve_engine(profile: DeviceProfile) -> str:
    """The engine that runs this profile; `auto` is decided here, and logged. MissingCapability: no such device."""
    if profile.engine != "auto":
        return profile.engine
    if num_visible_devices(profile.device) == 0:
        raise MissingCapability(
            f"profile {profile.name}: no {profile.device} device is visible on this machine; "
            "pick another profile, or run `lopa doctor` to see what is here"
        )
    engine = _ENGINE_OF_DEVICE[profile.device]
    logger.info("profile %s: engine auto is %s, for device %s", profile.name, engine, profile.device)
    return engine


def resolve_mesh(profile: DeviceProfile) -> MeshConfig:
    """The profile's mesh. `auto` takes every started process, or before a launch every device this node can see."""
    if isinstance(profile.mesh, MeshConfig):
        return profile.mesh
    num_processes = num_started() if "WORLD_SIZE" in os.environ else max(1, num_visible_devices(profile.device))
    tensor_parallel = _AUTO_TENSOR_PARALLEL.get(_ENGINE_OF_DEVICE[profile.device], 1)
    if num_processes % tensor_parallel:
        tensor_parallel = 1
    mesh = MeshConfig(
        branch_parallel_size=num_processes // tensor_parallel,
        tensor_parallel_size=tensor_parallel,
    )
    logger.info("profile %s: mesh auto is bp%d tp%d", profile.name, mesh.branch_parallel_size, tensor_parallel)
    return mesh


def check_started(profile: DeviceProfile) -> MeshConfig:
    """The mesh, if as many processes were started as it has. Raises ConfigError naming both numbers."""
    sizes = resolve_mesh(profile)
    if num_started() != sizes.num_processes:
        raise ConfigError(
            f"profile {profile.name} wants {sizes.num_processes} processes "
            f"(dp {sizes.data_parallel_size} x bp {sizes.branch_parallel_size} x tp {sizes.tensor_parallel_size}) "
            f"but {num_started()} {'was' if num_started() == 1 else 'were'} started: "
            "start it with scripts/run_batch.sh (an evaluation: scripts/sweep.sh), which reads the number from "
            "the profile, or change mesh in the profile"
        )
    return sizes


def init_mesh(profile: DeviceProfile, backend: str, axis_backend: str | None = None) -> Mesh:
    """Join the run's processes; blocks until all have come. Raises ConfigError if the profile wants another number.

    `backend` is torch.distributed's ("gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,npu:hccl"). `axis_backend` is that of the
    axes' groups, if another. The caller has already made its accelerator current. No process group exists where the
    mesh has one process.
    """
    sizes = check_started(profile)
    if sizes.num_processes == 1:
        return Mesh()
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    timeout = timedelta(seconds=profile.collective_timeout_s)
    shape = (sizes.data_parallel_size, sizes.branch_parallel_size, sizes.tensor_parallel_size)
    override: Any = None if axis_backend is None else dict.fromkeys(AXES, axis_backend)
    try:
        dist.init_process_group(backend, timeout=timeout)
        device_mesh = init_device_mesh(profile.device, shape, mesh_dim_names=AXES, backend_override=override)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        problem = f"rank {global_rank()}: could not join the other processes over {backend}: {reason}"
        raise EngineError(problem) from error
    return _place(device_mesh, sizes)


def _place(device_mesh: Any, sizes: MeshConfig) -> Mesh:
    dp_rank, bp_rank, tp_rank = device_mesh.get_coordinate()
    return Mesh(
        dp_rank=dp_rank,
        dp_size=sizes.data_parallel_size,
        bp_rank=bp_rank,
        bp_size=sizes.branch_parallel_size,
        tp_rank=tp_rank,
        tp_size=sizes.tensor_parallel_size,
        rank=global_rank(),
        local_rank=local_rank(),
        bp_group=device_mesh.get_group("bp") if sizes.branch_parallel_size > 1 else None,
        tp_group=device_mesh.get_group("tp") if sizes.tensor_parallel_size > 1 else None,
    )


def share_from_first(value: Any) -> Any:
    """Rank 0's value (plain JSON) on every rank; every rank calls it.

    Replicas may come hours apart, where one has the harder requests, and a collective would time out. So this and
    `wait_for_all` go through the launcher's key-value store, without a deadline: if a process dies, it ends the others.
    """
    if num_started() == 1:
        return value
    store, key = _store(), _next_key("value")
    if global_rank() == 0:
        store.set(key, json.dumps(value))
        return value
    while not store.check([key]):
        time.sleep(_POLL_S)
    return json.loads(store.get(key))


def wait_for_all(while_waiting: Callable[[], None]) -> None:
    """Rank 0 returns when every rank has come here, the others at once."""
    if num_started() == 1:
        return
    store, key = _store(), _next_key("arrived")
    num_arrived = store.add(key, 1)
    while global_rank() == 0 and num_arrived < num_started():
        time.sleep(_POLL_S)
        while_waiting()
        num_arrived = store.add(key, 0)


_next = count()


def _next_key(kind: str) -> str:
    """The same on every rank, since all make the same calls."""
    return f"lopa/{kind}/{next(_next)}"


@cache
def _store() -> Any:
    import torch.distributed as dist

    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]


def close_mesh() -> None:
    """Leave the process groups, if there are any."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
