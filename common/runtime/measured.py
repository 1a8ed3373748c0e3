"""What the bench asks of an engine, for engines whose passes can tell."""

from __future__ import annotations

from typing import Any, Protocol

from common.runtime.times import PassTimes, Stopwatch


class MeasurablePasses(Protocol):
    busy: Stopwatch
    times: PassTimes

    def gather_ms(self, num_reads: int) -> float: ...

    def memory(self) -> dict[str, float]: ...


class MeasuredEngine:
    """Answers of `common.bench.run.Measurable` that are the passes'."""

    passes: Any  # MeasurablePasses

    def keep_times(self, wanted: bool) -> None:
        self.passes.times.keep(wanted)

    def last_times_ms(self) -> dict[str, float]:
        times: dict[str, float] = self.passes.times.last_ms()
        return times

    def last_busy_ms(self) -> float:
        seconds: float = self.passes.busy.seconds
        return seconds * 1e3

    def gather_ms(self, num_reads: int) -> float:
        milliseconds: float = self.passes.gather_ms(num_reads)
        return milliseconds

    def memory(self) -> dict[str, float]:
        numbers: dict[str, float] = self.passes.memory()
        return numbers
