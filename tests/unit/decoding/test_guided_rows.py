"""Guidance has a second row for every branch. Whoever looks at branches looks at the first half alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_core import DECODE, EOS, MASK, HashedEngine, request

from common.config import DecodeConfig
from common.decoding import Completion, Int, PassCosts, Room, Scheduler, StepPlan, decode_requests
from common.decoding.scheduling.budget import BranchBudget
from common.serving.engine.passes import CountedEngine

GUIDED = DecodeConfig.model_validate(
    {**DECODE.model_dump(), "strategy": {"name": "fast_dllm", "cache": "none", "cfg_scale": 1.0}, "max_new_tokens": 32}
)
CHEAP = PassCosts((1, 10**6), (1.0, 1.0))
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


def decoded(engine: Any, decode: DecodeConfig, costs: PassCosts | None = None) -> list[Completion]:
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=3, costs=costs)
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
        assert (np.diff(request_R) >= 0).all(), "of one request behind those of another"
    plain = Noted()
    decoded(plain, DECODE)
    assert all(plan.num_guiding_rows == 0 and plan.request_R[plan.scored].size == plan.num_rows for plan in plain.plans)


@pytest.mark.parametrize("decode", [GUIDED, DECODE])
def test_a_budget_learns_and_decides_under_guidance(decode: DecodeConfig) -> None:
    """Where rows cost nothing, all are tried: the answers are those without a budget."""
    with_budget, without = decoded(Noted(), decode, CHEAP), decoded(Noted(), decode)
    assert [result.token_ids for result in with_budget] == [result.token_ids for result in without]
    assert max(result.num_forwards for result in with_budget) >= 8, "or nothing was learnt"


def test_what_is_learnt_of_guided_rows_is_what_is_learnt_of_the_branches_alone() -> None:
    engine, learnt = Noted(), []
    decoded(engine, GUIDED)
    for take in (lambda plan: plan, _without_guides):
        budget = BranchBudget(CHEAP, 2, 3)
        for slot in range(3):
            budget.admit(slot, 8, 0.5)
        for plan in engine.plans:
            own, predictions = take(plan), HashedEngine.forward(engine, plan)
            values_3T = predictions.values_3T[:, : own.num_tokens]
            score_R = np.linspace(0, 1, len(own.request_R[own.scored]))
            budget.learn(own, predictions._replace(values_3T=values_3T), score_R)
        learnt.append(budget.worth.tolist())
    assert learnt[0] == learnt[1]


def _without_guides(plan: StepPlan) -> StepPlan:
    half = plan.num_tokens // 2
    return plan._replace(
        entries_3T=plan.entries_3T[:, :half],
        is_read_T=plan.is_read_T[:half],
        row_fields_8R=plan.row_fields_8R[:, plan.scored],
        request_R=plan.request_R[plan.scored],
        num_guiding_rows=0,
    )


@pytest.mark.parametrize("decode", [GUIDED, DECODE])
def test_wins_are_counted_by_branch(decode: DecodeConfig) -> None:
    engine = CountedEngine(Noted(), lambda: [Room(3, decode)] * 3)  # type: ignore[arg-type]
    results = decoded(engine, decode)
    counts = engine.now(0, 0)
    won = [place for result in results for place in result.winner_per_step]
    names = {place: "anchor" if place == 0 else str(place) for place in won}
    assert counts.wins == {name: won.count(place) for place, name in names.items()}
    assert counts.num_rows == sum(result.num_rows for result in results) == sum(counts.windows_histogram)
