"""Answers held to a format, over random automata, predictions and strategies: each answer is accepted, whatever the
canvas, and requests without a format are decoded as if alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_block_strategies import EOS, MASK, VOCAB, configs

from common.config import DecodeConfig, Pace, paced
from common.constraints import Automaton
from common.decoding import (
    ClassStatistics,
    Completion,
    GenerationRequest,
    ModelFacts,
    PassCosts,
    Predictions,
    Rejection,
    Scheduler,
    StepPlan,
)
from common.decoding.scheduling.rules import Rules, no_stop_strings

COSTS = PassCosts((1, 40, 80, 400), (5e-3, 5.5e-3, 10e-3, 50e-3))  # a GPU that a few requests fill


def random_automaton(seed: int) -> Automaton:
    """Some states, a few classes of tokens, and at least one text."""
    rng = np.random.default_rng(seed)
    while True:
        num_states, num_classes = int(rng.integers(2, 7)), int(rng.integers(3, 6))
        class_V = rng.integers(0, num_classes, VOCAB).astype(np.int32)
        class_V[: EOS + 1] = 0
        next_QC = rng.integers(0, num_states, (num_states, num_classes)).astype(np.int32)
        next_QC[rng.random(next_QC.shape) < 0.6] = -1
        next_QC[:, 0] = -1
        own = Automaton(class_V, next_QC, rng.random(num_states) < 0.4, 0, f"random {seed}")
        is_lively = own.distance_Q < 2**30
        next_QC[(next_QC >= 0) & ~is_lively[np.maximum(next_QC, 0)]] = -1
        own = Automaton(class_V, next_QC, own.is_final_Q, 0, own.key)
        if 0 < own.shortest < 9:
            return own


def predictions(plan: StepPlan, seed: int) -> Predictions:
    """Random logits of each request, pass and row, and all that an engine makes of them."""
    logit_TV = np.concatenate([
        np.random.default_rng((seed, key % 2**32, step)).standard_normal((count, VOCAB)) * 3
        for key, step, count in zip(plan.noise_key_R.tolist(), plan.step_R.tolist(), plan.num_entries_R, strict=True)
    ])  # fmt: skip
    logit_TV[:, MASK] = -1e30
    probability_T = 1 / np.exp(logit_TV - logit_TV.max(axis=1, keepdims=True)).sum(axis=1)
    values_3T = np.stack((logit_TV.argmax(axis=1), probability_T, probability_T - 1)).astype(np.float32)
    values_3T[:, ~plan.is_read_T] = np.nan
    request_T, classes = plan.request_R.repeat(plan.num_entries_R), {}
    for own in {own.key: own for own in (plan.automaton_of or {}).values()}.values():
        requests = [request for request, other in (plan.automaton_of or {}).items() if other is own]
        entry_X = (np.isin(request_T, requests) & plan.is_read_T).nonzero()[0]
        classes[own.key] = ClassStatistics(entry_X, _of_classes(own, logit_TV[entry_X]).astype(np.float32))
    return Predictions(values_3T, classes or None)


def _of_classes(own: Automaton, logit_XV: np.ndarray) -> np.ndarray:
    found_XC5 = np.full((len(logit_XV), own.num_classes, 5), -1e30)
    for number in range(own.num_classes):
        ids = (own.class_V == number).nonzero()[0]
        if len(ids):
            own_XI = logit_XV[:, ids]
            top_X = own_XI.max(axis=1)
            mass_X = top_X + np.log(np.exp(own_XI - top_X[:, None]).sum(axis=1))
            mean_X = (np.exp(own_XI - mass_X[:, None]) * own_XI).sum(axis=1)
            found_XC5[:, number] = np.stack((ids[own_XI.argmax(axis=1)], top_X, top_X, mass_X, mean_X), axis=1)
    return found_XC5


def decoded(
    decode: DecodeConfig, facts: ModelFacts, seed: int, requests: list[GenerationRequest],
    pace: Pace = "fixed", num_apart: int = 0,
) -> tuple[dict[str, Completion], dict[str, tuple[int, ...]]]:  # fmt: skip
    """num_apart: passes between two that begin."""
    scheduler = Scheduler(
        decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=len(requests), facts=facts, pace=pace, costs=COSTS
    )
    found: dict[str, Any] = {}
    told: dict[str, tuple[int, ...]] = {}
    waiting, number = [*requests], 0
    while waiting or scheduler.active:
        while waiting and (not scheduler.active or not num_apart or number % num_apart == 0):
            scheduler.admit(waiting.pop(0))
            number += bool(num_apart)
        number += 1
        plan = scheduler.plan_step()
        ended = scheduler.advance(scheduler.select_winners(predictions(plan, seed)))
        found |= {one.id: one for one in ended}
        for name, token_ids in scheduler.newly_final():
            told[name] = (*told.get(name, ()), *token_ids)
    return found, told


def is_held(config: tuple[DecodeConfig, ModelFacts]) -> bool:
    """Whether such answers are held to formats (not while they are edited), and models have this shift."""
    decode, facts = config
    is_edited = getattr(decode.strategy, "edit_threshold", None) is not None or decode.strategy.num_best > 0
    return not is_edited and not (decode.strategy.name == "block_diffusion" and facts.shift)


@settings(max_examples=60)
@given(
    config=configs().filter(is_held),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    kind=st.integers(0, 400),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_every_answer_is_accepted(
    config: tuple[DecodeConfig, ModelFacts], seed: int, lengths: list[int], kind: int, temperature: float
) -> None:
    decode, facts = config
    decode = decode.model_copy(update={"temperature": temperature})
    requests: list[GenerationRequest] = []
    for number, length in enumerate(lengths):
        own: Automaton | None = random_automaton(kind + number % 2)
        most = Rules.of(decode, EOS, no_stop_strings, facts).max_blocks * decode.block_size
        if own is not None and own.shortest > most:
            own = None
        cut = None if own is None or number else max(own.shortest, most // 2)
        requests.append(GenerationRequest(str(number), tuple(range(10, 10 + length)), max_tokens=cut, automaton=own))
    found, told = decoded(decode, facts, seed, requests)
    for request in requests:
        result = found[request.id]
        assert not isinstance(result, Rejection), result.reason
        if request.automaton is None or has_left_masks(decode, result):
            continue
        own, answer = request.automaton, [token for token in result.token_ids if token != EOS]
        state = own.after(own.start, own.class_V[answer])
        assert state >= 0 and own.is_final_Q[state], (result, answer)
        assert result.finish_reason == "eos"
        assert request.max_tokens is None or len(result.token_ids) <= request.max_tokens
        assert result.token_ids[: len(told.get(request.id, ()))] == told.get(request.id, ())[: len(result.token_ids)]


def has_left_masks(decode: DecodeConfig, result: Completion) -> bool:
    """Whether `max_block_steps` has ended the request with masks."""
    return getattr(decode.strategy, "max_block_steps", None) is not None and MASK in result.canvas_token_ids


@settings(max_examples=25)
@given(config=configs().filter(is_held), seed=st.integers(0, 2**32 - 1))
def test_others_are_decoded_as_without_it(config: tuple[DecodeConfig, ModelFacts], seed: int) -> None:
    decode, facts = config
    own = random_automaton(seed % 100)
    plain = [GenerationRequest(str(number), tuple(range(10, 14 + number))) for number in range(2)]
    held = GenerationRequest("held", (10, 11, 12), automaton=own if own.shortest <= decode.block_size else None)
    among, _ = decoded(decode, facts, seed, [plain[0], held, plain[1]])
    alone = {**decoded(decode, facts, seed, plain)[0], **decoded(decode, facts, seed, [held])[0]}
    assert {name: one.token_ids for name, one in among.items()} == {name: one.token_ids for name, one in alone.items()}


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["careful", "balanced", "fast"])
@pytest.mark.parametrize("strategy", ["d2f", "fast_dllm", "block_diffusion"])
def test_answers_are_accepted_in_whatever_ways_the_load_chooses(pace: Pace, strategy: str) -> None:
    decode = paced(
        DecodeConfig.model_validate(
            {"strategy": strategy, "block_size": 4, "max_new_tokens": 16, "skip_threshold": 0.5}
        ),
        pace,
    )
    ways = set()
    for seed in range(12):
        own = [random_automaton(seed + number) for number in range(5)]
        requests = [
            GenerationRequest(str(number), tuple(range(10, 11 + number)), automaton=one if one.shortest <= 16 else None)
            for number, one in enumerate(own)
        ]
        found, _ = decoded(decode, ModelFacts(0), seed, requests, pace, num_apart=2)
        for request, automaton in zip(requests, own, strict=True):
            result = found[request.id]
            assert not isinstance(result, Rejection), result.reason
            ways.add(tuple(name for name, _ in result.ways))
            if request.automaton is not None:
                answer = [token for token in result.token_ids if token != EOS]
                state = automaton.after(automaton.start, automaton.class_V[answer])
                assert state >= 0 and automaton.is_final_Q[state], (result, answer)
    assert any(len(own) > 1 for own in ways), "requests change their way"
