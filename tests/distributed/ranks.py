"""The ranks of a test as forks of one process: torch and the loops are read once, which is what starting them costs.

python -m tests.distributed.ranks WORKER DP BP TP CALLS    the worker's run_rank with the mesh and each of the calls
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import multiprocessing

from common.config import DeviceProfile, MeshConfig
from common.decoding.scheduling.warm import warm_up
from tests.ports import free_port


def cpu_profile(engine: str = "lopa_cuda", mesh: MeshConfig | None = None) -> DeviceProfile:
    return DeviceProfile.model_validate(
        {"name": "distributed", "engine": engine, "device": "cpu", "dtype": "float32", "max_model_len": 256,
         "mesh": mesh or MeshConfig()}
    )  # fmt: skip


def fork_ranks(run: Callable[..., None], num_ranks: int, *calls: tuple[Any, ...]) -> None:
    """Call `run(*call)` for one call after another in `num_ranks` processes with the environment that torchrun would
    give them, on a port of its own for each call."""
    warm_up()
    size = str(num_ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    ports: dict[int, None] = {}
    while len(ports) < len(calls):
        ports[free_port()] = None
    multiprocessing.start_processes(
        _rank, args=(run, [*zip(ports, calls, strict=True)]), nprocs=num_ranks, start_method="fork"
    )


def _rank(local_rank: int, run: Callable[..., None], calls: list[tuple[int, tuple[Any, ...]]]) -> None:
    os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank))
    for port, call in calls:
        os.environ["MASTER_PORT"] = str(port)
        run(*call)
    sys.stdout.flush()
    os._exit(0)  # simulated communicators have nobody to say goodbye to


if __name__ == "__main__":
    worker, dp, bp, tp, calls = sys.argv[1:]
    mesh = MeshConfig(data_parallel_size=int(dp), branch_parallel_size=int(bp), tensor_parallel_size=int(tp))
    run_rank = import_module(f"tests.distributed.{worker}").run_rank
    fork_ranks(run_rank, mesh.num_processes, *((mesh, *call) for call in json.loads(calls)))
