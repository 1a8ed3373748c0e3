"""The stopwatch of this engine's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from common.runtime import REPEATS


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """A `common.runtime.Clock`: by device events on a GPU, by the host's clock on a CPU."""
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
