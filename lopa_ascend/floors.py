"""What a device can do at best, measured: copy bandwidth, matrix rates. No step is faster than its bytes over the one
and its operations over the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from lopa_ascend.ops import Ops

_COPY_BYTES = {"npu": 2**31, "cpu": 2**26}
_MATRIX_SIZE = {"npu": 8192, "cpu": 512}
_REPEATS = 10
_SUSTAINED_S = 0.5


def measure_floors(ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """bytes_per_s of a copy (read plus written), flops_per_s of a product in `dtype`, int8_ops_per_s of quant_matmul.

    sustained_flops_per_s: the product for half a second, when the device lowers its clock to save power.
    """
    source = torch.zeros(_COPY_BYTES[device.type] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source), device)
    size = _MATRIX_SIZE[device.type]
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, size, generator=draw).to(device, dtype) for _ in range(2))
    product_s = _median_s(lambda: left @ right, device)
    sustained_s = _median_s(lambda: left @ right, device, max(_REPEATS, int(_SUSTAINED_S / product_s)))
    int8 = torch.randint(-127, 128, (size, size), generator=draw, dtype=torch.int8).to(device)
    weight, scale = ops.to_nz(int8.clone()), torch.ones(size, device=device)
    int8_s = _median_s(lambda: ops.quant_matmul(int8, weight, scale, scale_T=scale), device)
    operations = 2.0 * size**3
    return {
        "bytes_per_s": 2 * source.numel() / copy_s,
        "flops_per_s": operations / product_s,
        "sustained_flops_per_s": operations / sustained_s,
        "int8_ops_per_s": operations / int8_s,
    }


def _median_s(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
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
