"""The stopwatch of this engine's device, and what its matrix units do in 8 bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from common.runtime import REPEATS, matrix_size, measure_floors
from lopa_ascend.ops import Ops


def measure_npu_floors(ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """common.runtime.measure_floors, and int8_ops_per_s of quant_matmul."""
    size = matrix_size(device)
    draw = torch.Generator().manual_seed(1)
    int8 = torch.randint(-127, 128, (size, size), generator=draw, dtype=torch.int8).to(device)
    weight, scale = ops.to_nz(int8.clone()), torch.ones(size, device=device)
    int8_s = median_seconds(lambda: ops.quant_matmul(int8, weight, scale, scale_T=scale), device)
    return {**measure_floors(device, dtype, median_seconds), "int8_ops_per_s": 2.0 * size**3 / int8_s}


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """common.runtime.floors.Clock, on the host's clock."""
    for _ in range(3):
        work()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.npu.synchronize()
