"""How a step of the engine differs from a trace's, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from common.decoding import StepRecord

Step = TypeVar("Step")
TOLERANCE = 1e-3  # of scores, probabilities, confidences and entropies


def first_step(
    steps: Iterable[Step],
    records: Iterable[StepRecord],
    exact: Callable[[Step, StepRecord], Iterable[tuple[str, Any, Any]]],
    close: Callable[[Step, StepRecord], Iterable[tuple[str, float, float]]],
) -> str | None:
    """Name the first step that differs from the trace's, and how; None if all agree.

    exact, close: (what, wanted, found) of a step; those of `close` may differ by TOLERANCE, and are looked at only
    where all of `exact` agree.
    """
    for number, (step, record) in enumerate(zip(steps, records, strict=False), start=1):
        for what, wanted, found in exact(step, record):
            if wanted != found:
                return f"step {number}: {what} {found}, the trace has {wanted}"
        for what, wanted, found in close(step, record):
            if not abs(wanted - found) <= TOLERANCE:
                return f"step {number}: {what} is {found:.6f}, the trace has {wanted:.6f}"
    return None
