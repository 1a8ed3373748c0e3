"""How long a step's passes take: on the host's clock always, on the device's where somebody asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Seconds from the last `start` to the last `stop`: what an engine notes of a pass."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._started


class PassTimes:
    """Device milliseconds of a pass by part, from events that the device notes between them.

    make_event: makes an event of the device's kind, with timing; None where the device keeps no times.
    """

    PARTS = ("layers", "head")

    def __init__(self, make_event: Callable[[], Any] | None) -> None:
        self._make_event = make_event
        self._marks: list[Any] = []

    def keep(self, wanted: bool) -> None:
        """Whether the device is to note when each part of a pass begins and ends, which costs some 50 us a pass."""
        is_noted = wanted and self._make_event is not None
        self._marks = [self._make_event() for _ in range(len(self.PARTS) + 1)] if is_noted and self._make_event else []

    def mark(self, index: int) -> None:
        """Note the beginning of part `index`, which is the end of the part before."""
        if self._marks:
            self._marks[index].record()

    def last_ms(self) -> dict[str, float]:
        """Milliseconds of the last pass by part, once it has ended; empty unless `keep` was called."""
        if not self._marks:
            return {}
        return {name: self._marks[i].elapsed_time(self._marks[i + 1]) for i, name in enumerate(self.PARTS)}
