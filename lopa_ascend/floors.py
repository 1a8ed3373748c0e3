"""The stopwatch of this engine's device, what its matrix units do in 8 bits, and what writing lengths costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Literal, Protocol, runtime_checkable

import torch

from common.runtime import REPEATS, matrix_size, measure_floors
from graphs.runner import Capture
from lopa_ascend.ops import Ops


class LengthsCapture(Capture, Protocol):
    """A capture whose replays follow the attention's host lists. updates: whether changed ones are written after
    (`after`) or before the replay is launched."""

    lengths: dict[str, list[int]]
    updates: Literal["after", "before"]


@runtime_checkable
class UpdatedReplay(Protocol):
    """A replay that the lengths are written for."""

    def __call__(self) -> None: ...

    def forget_lengths(self) -> None:
        """Have the next run write them anew."""


def measure_npu_floors(ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure what `common.runtime.measure_floors` does, and int8_ops_per_s of quant_matmul."""
    size = matrix_size(device)
    draw = torch.Generator().manual_seed(1)
    int8 = torch.randint(-127, 128, (size, size), generator=draw, dtype=torch.int8).to(device)
    weight, scale = ops.to_nz(int8.clone()), torch.ones(size, device=device)
    int8_s = median_seconds(lambda: ops.quant_matmul(int8, weight, scale, scale_T=scale), device)
    return {**measure_floors(device, dtype, median_seconds), "int8_ops_per_s": 2.0 * size**3 / int8_s}


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """A `common.runtime.Clock`, on the host's clock."""
    for _ in range(3):
        work()
    seconds = []
    for _ in range(repeats):
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.npu.synchronize()


def length_updates_ms(capture: LengthsCapture, run: UpdatedReplay, device: torch.device) -> dict[str, float]:
    """Times of one replay from its launch to its end: with the lengths it has, and with written ones in both orders."""

    def with_update() -> None:
        run.forget_lengths()
        run()

    usual = capture.updates
    found = {"lengths kept": median_seconds(run, device) * 1e3}
    for order in ("after", "before"):
        capture.updates = order
        found[f"written {order}"] = median_seconds(with_update, device) * 1e3
    capture.updates = usual
    return found
