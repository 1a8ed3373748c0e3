"""What the bench asks of an engine, for engines whose passes can tell."""

from __future__ import annotations

from typing import Protocol

from common.decoding import StepPlan
from common.runtime.times import PassTimes, Stopwatch


class MeasurablePasses(Protocol):
    """What `MeasuredEngine` reads of an engine's passes."""

    num_tokens: int  # that the last pass ran at, its padding included
    busy: Stopwatch
    times: PassTimes

    def gather_ms(self, num_reads: int) -> float: ...

    def length_updates_ms(self) -> dict[str, float]: ...

    def memory(self) -> dict[str, float]: ...

    def num_experts_hit(self, plan: StepPlan) -> float | None: ...


class MeasuredEngine:
    """Answers of `common.bench.steps.Measurable` that are the passes'; an engine narrows `passes` to its own."""

    passes: MeasurablePasses

    def keep_times(self, wanted: bool) -> None:
        self.passes.times.keep(wanted)

    def last_times_ms(self) -> dict[str, float]:
        return self.passes.times.last_ms()

    def last_busy_ms(self) -> float:
        return self.passes.busy.seconds * 1e3

    def last_num_tokens(self) -> int:
        return self.passes.num_tokens

    def gather_ms(self, num_reads: int) -> float:
        return self.passes.gather_ms(num_reads)

    def length_updates_ms(self) -> dict[str, float]:
        return self.passes.length_updates_ms()

    def memory(self) -> dict[str, float]:
        return self.passes.memory()

    def num_experts_hit(self, plan: StepPlan) -> float | None:
        return self.passes.num_experts_hit(plan)
