"""The branch budget spends rows while they are cheap, learns what lookaheads bring, and tries all of them at times."""

from __future__ import annotations

import numpy as np
import pytest
from test_core import HashedEngine, request

from common.config import DecodeConfig
from common.decoding import (
    Completion,
    PassCosts,
    Predictions,
    RowField,
    Sampling,
    Scheduler,
    StepPlan,
    decode_requests,
    host_seconds,
)
from common.decoding.scheduling.budget import BranchBudget

CHEAP = PassCosts((1, 10**6), (1.0, 1.0))  # bound by weights
DEAR = PassCosts((1, 10**6), (1.0, 10.0**6))  # bound by products
KNEE = PassCosts((1, 256, 512), (1.0, 1.0, 2.0))
NUM_ENTRIES = 4


class CountedEngine(HashedEngine):
    """num_rows: of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows: list[int] = []

    def forward(self, plan: StepPlan) -> Predictions:
        self.num_rows.append(plan.num_rows)
        return super().forward(plan)


def budget(costs: PassCosts, most: int = 7, num_slots: int = 64) -> BranchBudget:
    made = BranchBudget(costs, most, num_slots)
    for slot in range(num_slots):
        made.admit(slot, 32, 0.9)
    return made


def deal(made: BranchBudget, num_requests: int, num_spawned: int = 7) -> list[int]:
    return made.deal(np.arange(num_requests), np.full(num_requests, num_spawned)).tolist()


def test_rows_that_cost_nothing_are_all_tried() -> None:
    assert deal(budget(CHEAP), 3) == [7, 7, 7]


def test_rows_that_cost_their_tokens_are_tried_while_they_bring_more_than_the_anchor_does() -> None:
    assert deal(budget(DEAR), 3) == [0, 0, 0]


def test_fewer_are_tried_as_load_rises() -> None:
    made = budget(KNEE)
    tried = [sum(deal(made, count)) / count for count in (1, 2, 4, 8, 32)]
    assert tried[0] == 7 and tried == sorted(tried, reverse=True) and tried[-1] == 0


def test_a_host_that_takes_long_has_more_tried() -> None:
    """Its seconds are spent once a step, whatever the step brings."""
    costs = DEAR._replace(host_of_one=100.0, host_of_more=100.0)
    assert sum(deal(budget(costs), 3)) > sum(deal(budget(DEAR), 3))


@pytest.mark.parametrize(
    "own",
    [
        {"stop": ["end"], "stop_token_ids": [1]},
        {"strategy": "block_diffusion", "window_attention": "block_causal", "block_size": 4, "max_new_tokens": 16},
        {"max_steps": 1},
    ],
)
def test_the_host_is_timed_whatever_ends_a_request(own: dict[str, object]) -> None:
    of_one, of_more = host_seconds(DecodeConfig.model_validate({"num_lookahead": 3, **own}), 2)
    assert of_one > 0 and of_more >= 0
    assert host_seconds(DecodeConfig.model_validate({"num_lookahead": 3, **own}), 1)[1] == 0


def test_a_pass_that_has_room_is_filled() -> None:
    """Of 256 tokens at one price, anchors take 128."""
    assert sum(deal(budget(KNEE), 4)) >= 4


def test_at_times_one_request_tries_all_it_has() -> None:
    made = budget(DEAR)
    counts = [deal(made, 2) for _ in range(300)]
    assert [sum(count) for count in counts if sum(count)] == [7] * 4
    assert {tuple(count) for count in counts} == {(0, 0), (7, 0), (0, 7)}


def plan_of(num_lookaheads: list[int]) -> StepPlan:
    num_rows = sum(num_lookaheads) + len(num_lookaheads)
    fields_8R = np.zeros((8, num_rows), dtype=np.int64)
    fields_8R[RowField.FIRST] = np.arange(num_rows) * NUM_ENTRIES
    fields_8R[RowField.NUM_ENTRIES] = NUM_ENTRIES
    request_R = np.arange(len(num_lookaheads)).repeat([count + 1 for count in num_lookaheads])
    fields_8R[RowField.SLOT] = request_R
    entries = num_rows * NUM_ENTRIES
    return StepPlan(
        np.zeros((3, entries), dtype=np.int64), np.ones(entries, dtype=np.bool_), fields_8R, request_R, (),
        Sampling("default", 0), commits_locally=False,
    )  # fmt: skip


def learnt(num_sure: list[int], scores: list[float], num_lookaheads: list[int]) -> list[float]:
    """The worth after many passes in which each row would fill so many masks."""
    made, plan = budget(CHEAP, most=max(num_lookaheads)), plan_of(num_lookaheads)
    is_sure = np.arange(NUM_ENTRIES) < np.array(num_sure)[:, None]
    probability = np.where(is_sure, 0.95, 0.5).ravel().astype(np.float32)
    predictions = Predictions.of(np.ones(probability.size), probability, probability)
    for _ in range(20000):
        made.learn(plan, predictions, np.array(scores))
    return made.worth.tolist()


def test_what_the_winner_among_fewer_branches_would_have_brought_is_learnt() -> None:
    # The anchor fills 2. The first lookahead wins over it with 3 and its own token, the second loses.
    worth = learnt([3, 4, 2], [0.8, 0.7, 0.5], [2])
    assert worth == pytest.approx([2, 0.7 * 2, 0], abs=0.1)


def test_a_branch_that_fills_nothing_is_forced_to_fill_one() -> None:
    assert learnt([0, 0], [0.5, 0.5], [1]) == pytest.approx([1, 0.7], abs=0.1)


def test_requests_without_lookaheads_teach_nothing_about_them() -> None:
    # Two prompts of one row, and a request whose lookahead wins.
    assert learnt([4, 4, 2, 1], [0.1, 0.1, 0.9, 0.5], [0, 0, 1]) == pytest.approx([1, 0.7 * 2], abs=0.1)


def test_a_scheduler_with_costs_decodes_all_and_tries_less() -> None:
    decode = DecodeConfig(num_lookahead=5, block_size=8, max_new_tokens=32, stop_at_eos=False)
    rows = {}
    for costs in (None, CHEAP, DEAR):
        scheduler = Scheduler(decode, mask_token_id=1, eos_token_id=2, num_slots=8, costs=costs)
        engine = CountedEngine()
        requests = [request(str(number)) for number in range(12)]
        results = list(decode_requests(iter(requests), scheduler, engine))
        assert len(results) == 12 and all(isinstance(result, Completion) for result in results)
        rows[costs] = sum(engine.num_rows) / len(engine.num_rows)
    assert rows[CHEAP] == rows[None] > rows[DEAR]
