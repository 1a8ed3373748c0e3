"""A clock that goes on as a test says, in the place of the module `time`: a busy machine changes nothing of it."""

from __future__ import annotations


class Clock:
    """now: seconds. Every look at it takes 10 microseconds, so that who polls gets on; who sleeps wakes at once."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
