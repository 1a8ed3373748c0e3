"""Guidance has a second row for every branch. Whoever looks at branches looks at the first half alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_core import DECODE, EOS, MASK, HashedEngine, request

from common.config import DecodeConfig
from common.decoding import Completion, Int, Room, Scheduler, StepPlan, decode_requests
from common.serving.engine.passes import CountedEngine

GUIDED = DecodeConfig.model_validate(
    {**DECODE.model_dump(), "strategy": {"name": "fast_dllm", "cache": "none", "cfg_scale": 1.0}, "max_new_tokens": 32}
)
NAMES = ("one", "two", "three", "four")


class Noted(HashedEngine):
    """plans: of all passes; winners: by pass."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        return super().forward(plan)

    def describe(self) -> dict[str, Any]:
        return {}


def decoded(engine: Any, decode: DecodeConfig) -> list[Completion]:
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=3)
    results = list(decode_requests(map(request, NAMES), scheduler, engine))
    assert all(isinstance(result, Completion) for result in results)
    return results  # type: ignore[return-value]


def test_a_plan_says_which_of_its_rows_are_branches() -> None:
    engine = Noted()
    decoded(engine, GUIDED)
    assert any(np.unique(plan.request_R).size > 1 for plan in engine.plans)
    for plan in engine.plans:
        assert plan.num_guiding_rows * 2 == plan.num_rows
        request_R: Int = plan.request_R[plan.scored]
        assert (np.diff(request_R) >= 0).all(), "of one request after those of another"
    plain = Noted()
    decoded(plain, DECODE)
    assert all(plan.num_guiding_rows == 0 and plan.request_R[plan.scored].size == plan.num_rows for plan in plain.plans)


@pytest.mark.parametrize("decode", [GUIDED, DECODE])
def test_wins_are_counted_by_branch(decode: DecodeConfig) -> None:
    engine = CountedEngine(Noted())  # type: ignore[arg-type]
    engine.rooms = lambda: [Room(3, decode)] * 3
    results = decoded(engine, decode)
    counts = engine.now(0, 0)
    won = [place for result in results for place in result.winner_per_step]
    names = {place: "anchor" if place == 0 else str(place) for place in won}
    assert counts.wins == {name: won.count(place) for place, name in names.items()}
    assert counts.num_rows == sum(result.num_rows for result in results) == sum(counts.windows_histogram)
