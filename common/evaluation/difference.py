"""How a step of the engine differs from a trace's, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TOLERANCE = 1e-3  # of scores, probabilities, confidences and entropies


def first_of(exact: Iterable[tuple[str, Any, Any]], close: Iterable[tuple[str, float, float]]) -> str | None:
    """The first of (what, wanted, found) that differ, those of `close` by more than TOLERANCE.

    `close` is looked at only where all of `exact` agree.
    """
    for what, wanted, found in exact:
        if wanted != found:
            return f"{what} {found}, the trace has {wanted}"
    for what, wanted, found in close:
        if not abs(wanted - found) <= TOLERANCE:
            return f"{what} is {found:.6f}, the trace has {wanted:.6f}"
    return None
