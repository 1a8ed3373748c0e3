"""Requests decoded all at once decide as requests decoded one after another: every row, winner, fill and lookahead of
every step, and every completion. Confidences are coarse, so that ties are many."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from test_scheduler import EOS, MASK, VOCAB

from common.config import DecodeConfig
from common.decoding import Completion, GenerationRequest, Int, Predictions, Sampling, StepPlan, StepRecord
from common.decoding.scheduling.arrays import RequestArrays
from common.decoding.scheduling.plain import PlainRequests
from common.decoding.scheduling.rules import Rules, no_stop_strings
from common.decoding.scheduling.state import Admission, Observer, Requests
from common.decoding.scheduling.switching import SwitchingRequests


def predict(plan: StepPlan, seed: int) -> Predictions:
    """A function of seed, request, step and branch alone."""
    values_3T = np.full((3, plan.num_tokens), np.nan, dtype=np.float32)
    branch = 0
    for row in range(plan.num_rows):
        branch = branch + 1 if row and plan.request_R[row] == plan.request_R[row - 1] else 0
        first, count = int(plan.first_R[row]), int(plan.num_entries_R[row])
        rng = np.random.default_rng((seed, int(plan.noise_key_R[row]), int(plan.step_R[row]), branch))
        token_T = np.where(rng.random(count) < 0.02, EOS, rng.integers(EOS + 1, VOCAB, count))
        probability_T = rng.integers(0, 32, count) / 32
        values_3T[:, first : first + count] = token_T, probability_T, probability_T - 1
    values_3T[:, ~plan.is_read_T] = np.nan  # whoever reads what was not asked for is caught
    return Predictions(values_3T)


def rows_of(plan: StepPlan) -> dict[int, list[Any]]:
    """What each slot computes, whatever the order of requests."""
    found: dict[int, list[Any]] = {}
    for row in range(plan.num_rows):
        own = slice(int(plan.first_R[row]), int(plan.first_R[row] + plan.num_entries_R[row]))
        fields = plan.row_fields_8R[1:, row].tolist()
        entries = plan.entries_3T[:, own].tolist(), plan.is_read_T[own].tolist()
        drawn = None if plan.sampling_3R is None else plan.sampling_3R[:, row].tolist()
        found.setdefault(int(plan.slot_R[row]), []).append((fields, entries, drawn))
    for span in plan.commits:
        found[span.slot].append(span[1:])
    return found


class Decoded:
    """Requests decoded step by step with `at_once` of them together; one is dropped in the middle. Under a budget some
    lookaheads are not tried."""

    def __init__(
        self,
        kind: Callable[[int, Callable[[StepRecord], None]], Requests],
        requests: list[tuple[GenerationRequest, DecodeConfig]],
        at_once: int,
        seed: int,
        has_budget: bool,
    ) -> None:
        self.plans: list[dict[int, list[Any]]] = []
        self.records: list[str] = []
        self.completions: list[list[Completion]] = []
        self.tokens: dict[str, tuple[int, ...]] = {}
        decoder = kind(at_once, Observer(lambda record: self.records.append(repr(record))))
        free, waiting, sampling = list(range(at_once)), list(enumerate(requests)), Sampling("default", MASK)
        while decoder.active or waiting:
            while waiting and free:
                number, (request, decode) = waiting.pop(0)
                rules = Rules.of(decode, EOS, no_stop_strings)
                decoder.add(Admission(request, rules, free.pop(0), number, 0, 0.0))
            if has_budget:
                slot_N = np.array([decoding.slot for decoding in decoder.active])
                decoder.keep_lookaheads(np.minimum(decoder.num_lookaheads(), (slot_N + len(self.plans)) % 4))
            plan = decoder.plan_step(sampling)
            self.plans.append(rows_of(plan))
            ended = decoder.advance(decoder.select_winners(predict(plan, seed)), 0.0)
            if len(self.plans) == 4 and (dropped := decoder.drop("1", 0.0)) is not None:
                ended.append(dropped)
            for request_id, token_ids in decoder.newly_final():
                self.tokens[request_id] = (*self.tokens.get(request_id, ()), *token_ids)
            free = sorted((*free, *(decoding.slot for decoding, _ in ended)))
            self.completions.append(sorted((done for _, done in ended), key=lambda done: done.id))
        self.records.sort()  # requests of one step come in any order


class AlwaysMoving(SwitchingRequests):
    """Decodes every other step in the other way."""

    def plan_step(self, sampling: Sampling) -> StepPlan:
        self._move_to_arrays() if self._now is self._plain else self._move_to_plain()
        return self._now.plan_step(sampling)


def random_decode(rng: random.Random, attention: str) -> DecodeConfig:
    size, score = (
        rng.choice([1, 2, 4, 8]),
        rng.choice(["mean", "mean", "sliding_window", "random", "expected(soon=0.3)"]),
    )
    strategy = "d2f" if attention == "block_causal" else rng.choice(["d2f", "d2f", "d2f", "fast_dllm", "vanilla"])
    choices: dict[str, Any] = {
        "block_add_threshold": rng.choice([0, 0.1, 0.5, 1]),
        "decoded_token_threshold": rng.choice([0.01, 0.5, 0.95, 1]),
        "skip_threshold": rng.choice([0.1, 0.5, 0.9, 0.97, 1]),
        "bottom_share": rng.choice([1.0, 0.5, 0.1]) if score == "mean" else 1.0,
        "creation_weight": rng.choice([0, 0.5]),
        "spawn_rule": rng.choice(["confident", "confident", "uncertain", "random", "mixed", "near"]),
        "lookahead_rule": rng.choice(["all", "all", "stalled(plenty=2)"]),
        "spawn_blocks": rng.choice(["all", "first"]),
        "shift_row": rng.choice(["stale", "fresh"]),
        "cache": rng.choice(["prefix", "dual"]) if strategy == "fast_dllm" else "prefix",
        "stop_at_eos": rng.random() < 0.5,
        "max_steps": rng.choice([None, None, None, 5]),
        **rng.choice([{}, {}, {"temperature": 0.5}, {"temperature": 1.5, "top_p": 0.5, "top_k": 7}]),
    }
    return DecodeConfig(
        strategy=strategy,
        num_lookahead=rng.randint(0, 9),
        block_size=size,
        max_new_tokens=size * rng.randint(1, 6) + rng.choice([0, 0, size - 1]),
        branch_score=score,
        window_attention=cast(Any, attention),
        **choices,
    )


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(n, marks=pytest.mark.slow) for n in range(40, 200))])
def test_all_at_once_decides_as_one_after_another(seed: int) -> None:
    rng = random.Random(seed)
    attention = rng.choice(["full", "block_causal"])
    shared = random_decode(rng, attention)
    requests = []
    for number in range(rng.randint(1, 7)):
        prompt = tuple(range(10, 10 + rng.choice([1, 3, 9, 300])))
        decode = random_decode(rng, attention) if rng.random() < 0.4 else shared
        requests.append((GenerationRequest(str(number), prompt), decode))
    at_once, has_budget = rng.randint(1, 5), rng.random() < 0.5
    arrays = Decoded(lambda count, observe: RequestArrays(count, MASK, observe), requests, at_once, seed, has_budget)
    plain = Decoded(lambda _, observe: PlainRequests(MASK, observe), requests, at_once, seed, has_budget)
    switching = Decoded(lambda count, observe: AlwaysMoving(count, MASK, observe), requests, at_once, seed, has_budget)
    for decoded in (arrays, switching):
        for step, (found, wanted) in enumerate(zip(decoded.plans, plain.plans, strict=True)):
            assert found == wanted, step
        assert decoded.records == plain.records
        assert decoded.completions == plain.completions
        assert decoded.tokens == plain.tokens
    assert sum(len(ended) for ended in plain.completions) == len(requests)


@pytest.mark.parametrize("seed", range(8))
def test_one_that_arrays_do_not_know_has_all_decoded_one_after_another(seed: int) -> None:
    rng = random.Random(seed)
    shared = DecodeConfig(strategy="fast_dllm", block_size=4, max_new_tokens=16, skip_threshold=0.9)
    odd = shared.model_copy(update={"fill_rule": "factor"})
    decodes = [shared] * 7 + [odd] + [shared] * 7
    prompts = [tuple(range(10, 10 + rng.choice([3, 9, 40]))) for _ in decodes]
    requests = [
        (GenerationRequest(str(number), prompt), decode)
        for number, (prompt, decode) in enumerate(zip(prompts, decodes, strict=True))
    ]
    ways: list[bool] = []

    class Watched(SwitchingRequests):
        def select_winners(self, predictions: Predictions) -> Int:
            are_known = all(decoding.rules.fits_arrays for decoding in self.active)
            ways.append(self._now is self._arrays)
            assert are_known or self._now is self._plain
            return super().select_winners(predictions)

    found = Decoded(lambda count, observe: Watched(count, MASK, observe), requests, 5, seed, has_budget=False)
    plain = Decoded(lambda _, observe: PlainRequests(MASK, observe), requests, 5, seed, has_budget=False)
    assert {True, False} == set(ways)
    assert (found.plans, found.completions, found.tokens) == (plain.plans, plain.completions, plain.tokens)
