"""Measures what a device can do at best: copy bandwidth and matrix rate.

No step is faster than its bytes over the one and its operations over the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

_COPY_BYTES = {"cuda": 2**32, "npu": 2**31, "cpu": 2**26}
_NOISE_BYTES = 2**20
_MATRIX_SIZE = {"cuda": 8192, "npu": 8192, "cpu": 512}
REPEATS = 10
_SUSTAINED_S = 0.5


class Clock(Protocol):
    """The platform's stopwatch."""

    def __call__(self, work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
        """Median seconds of single runs, after a few to warm up."""


def matrix_size(device: torch.device) -> int:
    return _MATRIX_SIZE[device.type]


def measure_floors(device: torch.device, dtype: torch.dtype, median_seconds: Clock) -> dict[str, float]:
    """Measure bytes_per_s of a copy (bytes read plus written) and flops_per_s of a matrix product, both on random data.

    sustained_flops_per_s: the same product for half a second, when the device lowers its clock to save power.
    """
    noise = torch.randint(0, 256, (_NOISE_BYTES,), dtype=torch.uint8).to(device)
    source = noise.repeat(_COPY_BYTES[device.type] // 2 // _NOISE_BYTES)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device)
    size = matrix_size(device)
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, size, generator=draw).to(device, dtype) for _ in range(2))
    product_s = median_seconds(lambda: left @ right, device)
    sustained_s = median_seconds(lambda: left @ right, device, max(REPEATS, int(_SUSTAINED_S / product_s)))
    flops = 2 * size**3
    return {
        "bytes_per_s": 2 * source.numel() / copy_s,
        "flops_per_s": flops / product_s,
        "sustained_flops_per_s": flops / sustained_s,
    }
