"""Run a function on several simulated devices, one process each, as torchrun would.

    results = run_ranks("npu_ranks:tensor_parallel_layer", world_size=2)

The processes are forked from one that has imported torch_npu, so that sixteen of them start in the time of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.ports import free_port


def run_ranks(target: str, world_size: int, timeout_s: float = 120.0, is_in_order: bool = True) -> list[Any]:
    """Call `module:function` on every rank; its JSON-able results by rank. A RuntimeError carries a failure's output.

    Inside, the rank's device is current, a SimulatedNpu is active and the default group is "cpu:gloo,npu:hccl".
    is_in_order: HCCL_DETERMINISTIC.
    """
    tests = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as results:
        path = os.pathsep.join([str(tests), str(tests.parents[1]), os.environ.get("PYTHONPATH", "")])
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "HCCL_DETERMINISTIC": str(is_in_order).lower(),
        }
        environment = {**os.environ, **address, "WORLD_SIZE": str(world_size), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-W", "ignore", "-m", "sim.ranks", target, results]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise RuntimeError(f"{target} on {world_size} ranks failed:\n{(done.stdout + done.stderr)[-4000:]}")
        return [json.loads((Path(results) / f"{rank}.json").read_text()) for rank in range(world_size)]


def main() -> None:
    target, results = sys.argv[1:]
    from sim import runtime

    runtime.load()
    import torch.multiprocessing as multiprocessing

    module, _, function = target.partition(":")
    work = getattr(import_module(module), function)
    world_size = int(os.environ["WORLD_SIZE"])
    multiprocessing.start_processes(_rank, args=(work, results), nprocs=world_size, start_method="fork")


def _rank(rank: int, work: Callable[[], Any], results: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    from sim.device import SimulatedNpu

    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    with SimulatedNpu():
        result = work()
    dist.barrier()
    (Path(results) / f"{rank}.json").write_text(json.dumps(result))
    # HCCL's communicators have nobody to say goodbye to.
    os._exit(0)


if __name__ == "__main__":
    main()
