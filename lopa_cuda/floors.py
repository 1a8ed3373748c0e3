"""What the device can do at best, measured: copy bandwidth and matrix rate.

No step is faster than its bytes over the one and its operations over the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
_REPEATS = 10
_SUSTAINED_S = 0.5


def measure_floors(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """bytes_per_s of a copy (bytes read plus written) and flops_per_s of a matrix product, both on random data.

    sustained_flops_per_s: the same product for half a second, when the device lowers its clock to save power.
    """
    source = torch.empty(_COPY_BYTES[device.type] // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s, num_bytes = median_seconds(lambda: target.copy_(source), device), 2 * source.numel()
    size = _MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product_s = median_seconds(lambda: left @ right, device)
    sustained_s = median_seconds(lambda: left @ right, device, repeats=max(_REPEATS, int(_SUSTAINED_S / product_s)))
    flops = 2 * size**3
    if device.type == "cuda":
        del source, target, left, right
        torch.cuda.empty_cache()  # else the next capture would release it, and count it as its own
    return {
        "bytes_per_s": num_bytes / copy_s,
        "flops_per_s": flops / product_s,
        "sustained_flops_per_s": flops / sustained_s,
    }


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median over single runs, by device events where there are any."""
    for _ in range(3):
        work()
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) * 1e-3)
        else:
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
