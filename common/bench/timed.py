"""The main loop with a stopwatch between its lines: where a decoding step's time goes, on host and device.

A model of random weights accepts no tokens, so predictions are made up (`ScriptedEngine`) while its passes are timed.
"""

from __future__ import annotations

import time
from statistics import fmean, median
from typing import Any

import numpy as np

from common.config import DecodeConfig
from common.decoding import (
    DREAM,
    Completion,
    Engine,
    GenerationRequest,
    ModelFacts,
    Predictions,
    Scheduler,
    StepPlan,
    WrappedEngine,
)
from common.runtime import DeviceEngine

ACCEPTED, UNSURE = 0.99, 0.5


class ScriptedEngine(WrappedEngine):
    """Predicts the first `num_accepted` masks of every row with confidence, the others without. shift: as in
    ModelFacts, by which entry a position is predicted."""

    def __init__(self, engine: Engine, num_accepted: int, shift: int = 1) -> None:
        super().__init__(engine)
        self._shift = shift
        self._num_accepted = num_accepted

    def answer(self, plan: StepPlan, predictions: Predictions) -> Predictions:
        first_T = plan.first_R.repeat(plan.num_entries_R)  # of the row
        entry_T = np.arange(plan.num_tokens) - first_T
        is_masked_T = (plan.token_T == plan.sampling.mask_token_id) & (entry_T >= self._shift)
        count_T = is_masked_T.cumsum()
        before_T = (count_T - is_masked_T)[first_T]  # masks of the rows before
        is_accepted_T = is_masked_T & (count_T - before_T <= self._num_accepted)
        probability_T = np.full(plan.num_tokens, UNSURE, dtype=np.float32)
        probability_T[is_accepted_T.nonzero()[0] - self._shift] = ACCEPTED
        # Earlier positions are a little surer, so that ties do not all fall to one branch.
        confidence_T = probability_T - entry_T.astype(np.float32) * 1e-4
        return Predictions.of(np.ones(plan.num_tokens, dtype=np.int64), probability_T, confidence_T)


class TimedDecoding:
    """common.decoding.decode_requests, one request after another, with predictions that `engine` makes up."""

    PARTS = ("schedule", "forward", "select", "commit", "advance")

    def __init__(
        self, engine: WrappedEngine, inner: DeviceEngine, decode: DecodeConfig, mask_token_id: int,
        facts: ModelFacts = DREAM,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._inner = inner
        self._scheduler = Scheduler(decode, mask_token_id=mask_token_id, eos_token_id=None, facts=facts)
        self._records: list[dict[str, float]] = []

    def decode(self, prompt: tuple[int, ...]) -> Completion:
        scheduler, engine = self._scheduler, self._engine
        scheduler.admit(GenerationRequest(str(len(self._records)), prompt))
        while True:
            times = [time.perf_counter()]
            plan = scheduler.plan_step()
            times.append(time.perf_counter())
            predictions = engine.forward(plan)
            times.append(time.perf_counter())
            winners = scheduler.select_winners(predictions)
            times.append(time.perf_counter())
            engine.commit(plan, winners)
            times.append(time.perf_counter())
            ended = scheduler.advance(winners)
            times.append(time.perf_counter())
            self._note(plan, times)
            if ended:
                (completion,) = ended
                assert isinstance(completion, Completion), completion
                return completion

    def summary(self) -> dict[str, Any]:
        """Median milliseconds of steps after the prompt, all of them and by whether they commit."""
        later = [record for record in self._records if not record["is_prompt"]]
        committing = [record for record in later if record["commits"]]
        plain = [record for record in later if not record["commits"]]
        return {
            "num_steps": len(later),
            "mean_width": fmean(record["width"] for record in later),
            "mean_rows": fmean(record["rows"] for record in later),
            "median_ms": _medians(later),
            "committing_ms": _medians(committing),
            "other_ms": _medians(plain),
            "by_width": _by_width(plain),
            "commit_cost_ms": _commit_cost_ms(_by_width(committing), _by_width(plain)),
        }

    def _note(self, plan: StepPlan, times: list[float]) -> None:
        record = {name: (times[i + 1] - times[i]) * 1e3 for i, name in enumerate(self.PARTS)}
        answering_ms = self._engine.answer_seconds * 1e3  # making up the predictions is no part of a step
        record["forward"] -= answering_ms
        record["step"] = (times[-1] - times[0]) * 1e3 - answering_ms
        record["device"] = self._inner.last_busy_ms()
        record["outside_device"] = record["step"] - record["device"]
        self._records.append(
            {
                **record,
                "width": int(plan.num_entries_R.max()),
                "rows": plan.num_rows,
                "commits": bool(plan.commits),
                "is_prompt": bool((plan.start_R == 0).any()),
            }
        )


def _medians(records: list[dict[str, float]]) -> dict[str, float]:
    names = [*TimedDecoding.PARTS, "device", "outside_device", "step"]
    return {name: median(record[name] for record in records) for name in names} if records else {}


def _by_width(records: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    widths = sorted({int(record["width"]) for record in records})
    return {str(width): _medians([record for record in records if record["width"] == width]) for width in widths}


def _commit_cost_ms(committing: dict[str, dict[str, float]], plain: dict[str, dict[str, float]]) -> float | None:
    """How much longer a step takes that commits, over windows that steps of both kinds had."""
    shared = committing.keys() & plain.keys()
    return fmean(committing[width]["step"] - plain[width]["step"] for width in shared) if shared else None


def request_times(completions: list[Completion]) -> dict[str, float]:
    """Tokens per second of a request: from admission to end, and without the first step's time (the paper's way).

    Every position of the canvas counts; `effective_tpf` counts up to the end of the text.
    """
    tokens = [completion.num_canvas_tokens for completion in completions]
    num_forwards = sum(completion.num_forwards for completion in completions)
    return {
        "tpf": sum(tokens) / num_forwards,
        "effective_tpf": sum(completion.num_effective_tokens for completion in completions) / num_forwards,
        "tps": fmean(count / done.total_s for count, done in zip(tokens, completions, strict=True)),
        "tps_without_first_step": fmean(
            count / max(1e-9, done.total_s - done.first_step_s) for count, done in zip(tokens, completions, strict=True)
        ),
        "first_step_ms": median(completion.first_step_s for completion in completions) * 1e3,
    }
