"""What the bench measures of a pass besides its own parts: the gather alone, and what writing lengths costs."""

from __future__ import annotations

import time
from typing import Literal, Protocol, runtime_checkable

import torch

from graphs.runner import Capture
from lopa_ascend.floors import median_seconds, synchronize
from lopa_ascend.parallel import Collectives


class LengthsCapture(Capture, Protocol):
    """A capture whose replays follow the attention's host lists. updates: when changed ones are written."""

    lengths: dict[str, list[int]]
    updates: Literal["behind", "before"]


@runtime_checkable
class UpdatedReplay(Protocol):
    """A replay that the lengths are written for."""

    def __call__(self) -> None: ...

    def forget_lengths(self) -> None:
        """Have the next run write them anew."""


def gather_ms(collectives: Collectives, num_reads: int, device: torch.device) -> float:
    """The gather over bp alone; 0 without branch parallelism."""
    if collectives.mesh.bp_group is None:
        return 0.0
    predicted_M3, repeats = torch.zeros((num_reads, 3), device=device), 50
    for timed in (False, True):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats if timed else 3):
            collectives.bp_stack(predicted_M3)
        synchronize(device)
    return (time.perf_counter() - began) / repeats * 1e3


def length_updates_ms(capture: LengthsCapture, run: UpdatedReplay, device: torch.device) -> dict[str, float]:
    """Of one replay from its launch to its end: with the lengths it has, and with written ones in both orders."""

    def with_update() -> None:
        run.forget_lengths()
        run()

    usual = capture.updates
    found = {"lengths kept": median_seconds(run, device) * 1e3}
    for order in ("behind", "before"):
        capture.updates = order
        found[f"written {order}"] = median_seconds(with_update, device) * 1e3
    capture.updates = usual
    return found
