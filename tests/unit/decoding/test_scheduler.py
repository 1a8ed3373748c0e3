"""Invariants of the scheduler under random predictions: it ends, only masks change, commits leave no gap, branches are
the anchor plus one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import DecodeConfig, FastDllm
from common.decoding import (
    Completion,
    GenerationRequest,
    Int,
    Predictions,
    Scheduler,
    StepPlan,
    StepRecord,
    assign_rows,
)
from common.decoding.scheduling.scheduler import noise_key
from common.decoding.scheduling.tables import positions_of

MASK, EOS, VOCAB = 5, 6, 50


class RandomEngine:
    """Predicts random tokens with random confidences; remembers every plan and commit."""

    def __init__(self, seed: int, eos_share: float = 0.02) -> None:
        self.rng = np.random.default_rng(seed)
        self.eos_share = eos_share
        self.plans: list[StepPlan] = []
        self.commits: list[tuple[int, int, int]] = []

    def forward(self, plan: StepPlan) -> Predictions:
        self.plans.append(plan)
        shape = plan.token_T.shape
        token_T = self.rng.integers(EOS + 1, VOCAB, shape)
        token_T[self.rng.random(shape) < self.eos_share] = EOS
        probability_T = self.rng.random(shape, dtype=np.float32)
        unread = ~plan.is_read_T  # whoever reads what was not asked for is caught
        token_T[unread], probability_T[unread] = MASK, np.nan
        return Predictions.of(token_T, probability_T, probability_T - 1)

    def commit(self, plan: StepPlan) -> None:
        self.commits += [(span.slot, span.start, span.length) for span in plan.commits]


@st.composite
def decode_configs(draw: st.DrawFn) -> DecodeConfig:
    size = draw(st.sampled_from([1, 2, 4, 8]))
    strategy = draw(st.sampled_from(["d2f", "d2f", "d2f", "fast_dllm", "vanilla"]))
    branch_score = draw(st.sampled_from(["mean", "sliding_window", "random"]))
    created, rule = draw(st.sampled_from([0.0, 0.5])), draw(st.sampled_from(["confident", "uncertain", "random"]))
    share = f"bottom_share={draw(st.sampled_from([1.0, 0.5, 0.1]))}, " if branch_score == "mean" else ""
    cache: Any = draw(st.sampled_from(["prefix", "dual"]))
    return DecodeConfig(
        strategy=FastDllm(cache=cache) if strategy == "fast_dllm" else strategy,
        num_lookahead=draw(st.integers(0, 9)),
        block_size=size,
        max_new_tokens=size * draw(st.integers(1, 6)) + draw(st.sampled_from([0, 0, size - 1])),
        block_add_threshold=draw(st.floats(0, 1)),
        decoded_token_threshold=draw(st.floats(0.01, 1)),
        skip_threshold=draw(st.floats(0.05, 1)),
        branch_score=f"{branch_score}({share}created={created})",
        spawn_rule=rule + draw(st.sampled_from(["", "(blocks=1)"])),
        window_attention=draw(st.sampled_from(["full", "block_causal"])) if strategy == "d2f" else "full",
        shift_row=draw(st.sampled_from(["stale", "fresh"])),
        stop_at_eos=draw(st.booleans()),
    )


def run(
    decode: DecodeConfig, seed: int, num_requests: int = 1
) -> tuple[RandomEngine, list[Completion], list[StepRecord]]:
    engine, records = RandomEngine(seed), []
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=num_requests, observer=records.append)
    for number in range(num_requests):
        scheduler.admit(GenerationRequest(str(number), tuple(range(10, 13 + number))))
    completions: list[Completion] = []
    while scheduler.active:
        plan = scheduler.plan_step()
        check_plan(plan, scheduler)
        winners = scheduler.select_winners(engine.forward(plan))
        engine.commit(plan)
        completions += scheduler.advance(winners)
    return engine, completions, records


def window_of(plan: StepPlan, row: int) -> Int:
    """The tokens of the row's keys."""
    first = plan.first_R[row]
    return plan.token_T[first : first + plan.num_keys_R[row]]


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """Rows lie one after another. Every request's last row is its anchor; the others differ from it in exactly one
    position, filled there only."""
    assert plan.first_R[0] == 0 and (plan.first_R + plan.num_entries_R)[-1] == plan.num_tokens
    assert (plan.first_R[1:] == (plan.first_R + plan.num_entries_R)[:-1]).all()
    assert np.array_equal(plan.entries_of(np.arange(plan.num_rows)), np.arange(plan.num_tokens))
    for number, decoding in enumerate(scheduler.active):
        rows = np.flatnonzero(plan.request_R == number)
        anchor = rows[-1]
        start, end = int(plan.start_R[anchor]), int(plan.start_R[anchor] + plan.num_keys_R[anchor])
        window = window_of(plan, anchor)
        token_P, is_masked_P = positions_of(scheduler._requests._store.loops, decoding.slot)
        assert (window == token_P[start:end]).all()
        assert ((window == MASK) == is_masked_P[start:end]).all()
        for row in rows[:-1]:
            tokens = window_of(plan, row)
            keys = min(len(tokens), len(window))
            differs = np.flatnonzero(tokens[:keys] != window[:keys])
            assert len(differs) == 1 and window[differs[0]] == MASK and tokens[differs[0]] != MASK
            assert (tokens[keys:] == MASK).all()
            if scheduler.decode.spawn_rule.endswith("(blocks=1)"):
                size = decoding.rules.block_size
                own = (start + int(differs[0]) - decoding.prompt_length) // size
                assert not is_masked_P[: decoding.prompt_length + own * size].any()


@settings(max_examples=250)
@given(decode=decode_configs(), seed=st.integers(0, 2**32))
def test_decoding_ends_and_fills_only_masks(decode: DecodeConfig, seed: int) -> None:
    engine, (completion,), records = run(decode, seed)
    positions = [position for record in records for position in record.filled]
    assert len(positions) == len(set(positions)), "a position was filled twice"
    assert completion.num_forwards == len(records) == len(engine.plans)
    assert completion.num_forwards <= decode.max_new_tokens + decode.max_new_tokens // decode.block_size + 1
    assert sum(completion.tokens_per_step) == completion.num_canvas_tokens
    assert [winner == 0 for winner in completion.winner_per_step] == [record.winner_is_anchor for record in records]
    for record, winner, window in zip(records, completion.winner_per_step, completion.window_per_step, strict=True):
        assert window == record.window_lengths[winner - 1]  # lookaheads first, the anchor last
    assert completion.finish_reason in ("eos", "length")
    if not decode.stop_at_eos:
        assert MASK not in completion.canvas_token_ids
    assert completion.token_ids == completion.canvas_token_ids[: len(completion.token_ids)]
    assert EOS not in completion.token_ids[:-1] and MASK not in completion.token_ids


@settings(max_examples=150)
@given(decode=decode_configs(), seed=st.integers(0, 2**32))
def test_committed_spans_leave_no_gap(decode: DecodeConfig, seed: int) -> None:
    engine, _, _ = run(decode, seed)
    if decode.strategy.name == "d2f":
        ends = [0]
        for _, start, length in engine.commits:
            assert start == ends[-1]
            ends.append(start + length)
    for plan in engine.plans:
        for span in plan.commits:
            rows = plan.request_R == span.request
            assert (plan.start_R[rows] == span.start).all(), "a commit span is the start of its rows' windows"
            assert (plan.num_keys_R[rows] >= span.length).all()
            tokens = np.array([window_of(plan, row)[: span.length] for row in np.flatnonzero(rows)])
            assert decode.strategy.name != "d2f" or not (tokens == MASK).any(), "a mask would be committed"
            assert (tokens == tokens[0]).all() or decode.strategy.name != "d2f", "branches differ in what they commit"


@settings(max_examples=100)
@given(decode=decode_configs(), seed=st.integers(0, 2**32))
def test_branches_number_at_most_k_plus_one(decode: DecodeConfig, seed: int) -> None:
    _, _, records = run(decode, seed)
    assert all(1 <= len(record.window_lengths) <= decode.num_lookahead + 1 for record in records)
    confidences = [[made[2] for made in record.lookahead] for record in records]
    if decode.spawn_rule == "confident":
        assert all(row == sorted(row, reverse=True) for row in confidences)


@settings(max_examples=50)
@given(decode=decode_configs(), seed=st.integers(0, 2**32), num_requests=st.integers(2, 5))
def test_several_requests_end_together_or_not(decode: DecodeConfig, seed: int, num_requests: int) -> None:
    _, completions, _ = run(decode, seed, num_requests)
    assert sorted(completion.id for completion in completions) == [str(n) for n in range(num_requests)]


@settings(max_examples=50)
@given(decode=decode_configs(), seed=st.integers(0, 2**32), num_ranks=st.integers(1, 5))
def test_every_row_has_a_rank_and_ranks_have_equal_shares(decode: DecodeConfig, seed: int, num_ranks: int) -> None:
    engine, _, _ = run(decode, seed, num_requests=2)
    for plan in engine.plans:
        row_of = assign_rows(plan, num_ranks)
        assert set(row_of.flatten()) == set(range(plan.num_rows))
        if plan.commits_locally:
            for span in plan.commits:
                assert all((plan.request_R[hand] == span.request).any() for hand in row_of)


def test_the_anchor_loses_ties() -> None:
    decode = DecodeConfig(num_lookahead=2, block_size=4, max_new_tokens=4)
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS)
    scheduler.admit(GenerationRequest("0", (1, 2)))
    for expected_rows, expected_winner in ((1, 0), (3, 0)):
        plan = scheduler.plan_step()
        assert plan.num_rows == expected_rows
        same = np.full(plan.token_T.shape, 0.5, dtype=np.float32)
        winners = scheduler.select_winners(Predictions.of(np.full(plan.token_T.shape, 9), same, same))
        assert winners[0] == expected_winner
        scheduler.advance(winners)


def test_a_step_cap_ends_a_request() -> None:
    decode = DecodeConfig(num_lookahead=0, block_size=8, max_new_tokens=64, skip_threshold=1.0, max_steps=3)
    _, (completion,), _ = run(decode, seed=1)
    assert completion.finish_reason == "max_steps" and completion.num_forwards == 3


class FourTokens:
    """Finds that four tokens are needed to see that three are enough."""

    num_seen = 0

    def find(self, more_ids: Sequence[int], is_over: bool) -> int | None:
        self.num_seen += len(more_ids)
        return 3 if self.num_seen >= 4 else None


def test_a_stop_string_cuts_the_tokens() -> None:
    decode = DecodeConfig(num_lookahead=0, block_size=8, max_new_tokens=16, skip_threshold=1.0, stop=("x",))
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, stop_finder=lambda decode: FourTokens)
    scheduler.admit(GenerationRequest("0", (1, 2)))
    completions: list[Completion] = []
    engine = RandomEngine(3, eos_share=0.0)
    while scheduler.active:
        completions += scheduler.advance(scheduler.select_winners(engine.forward(scheduler.plan_step())))
    assert completions[0].finish_reason == "stop" and len(completions[0].token_ids) == 3


def test_an_empty_prompt_is_refused() -> None:
    scheduler = Scheduler(DecodeConfig(), mask_token_id=MASK, eos_token_id=EOS)
    with pytest.raises(ValueError, match="prompt is empty"):
        scheduler.admit(GenerationRequest("7", ()))


def test_noise_keys_depend_on_seed_and_request_alone() -> None:
    assert noise_key(0, "a") == noise_key(0, "a")
    assert len({noise_key(seed, name) for seed in range(4) for name in "abcd"}) == 16


def test_every_id_has_a_key_half_a_surrogate_pair_too() -> None:
    assert noise_key(0, "\ud800") != noise_key(0, "\ud801")


@pytest.mark.parametrize("num_slots", [1, 3])
def test_without_an_end_token_the_canvas_is_filled(num_slots: int) -> None:
    decode = DecodeConfig(num_lookahead=2, block_size=4, max_new_tokens=16, eos_token_id=-1)
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=num_slots)
    scheduler.admit(GenerationRequest("a", (10, 11)))
    engine, completions = RandomEngine(0, eos_share=0.5), []
    while scheduler.active:
        plan = scheduler.plan_step()
        completions += scheduler.advance(scheduler.select_winners(engine.forward(plan)))
    assert completions[0].finish_reason == "length" and len(completions[0].token_ids) == 16


@settings(max_examples=60, deadline=None)
@given(decode=decode_configs(), seed=st.integers(0, 2**32), num_requests=st.sampled_from([1, 3, 6]))
def test_a_stop_token_ends_as_an_end_token_does(decode: DecodeConfig, seed: int, num_requests: int) -> None:
    _, by_end, _ = run(decode, seed, num_requests)
    wanted = [(one.id, one.token_ids, "stop" if one.finish_reason == "eos" else one.finish_reason) for one in by_end]
    for end_token in (None, -1):
        stops = decode.model_copy(update={"eos_token_id": end_token, "stop_token_ids": (EOS,)})
        _, by_stop, _ = run(stops, seed, num_requests)
        assert [(one.id, one.token_ids, one.finish_reason) for one in by_stop] == wanted
    stops = decode.model_copy(update={"eos_token_id": -1, "stop_token_ids": (VOCAB - 1, EOS)})
    _, by_two, _ = run(stops, seed, num_requests)
    assert all(not {EOS, VOCAB - 1} & {*one.token_ids[:-1]} and one.finish_reason != "eos" for one in by_two)
