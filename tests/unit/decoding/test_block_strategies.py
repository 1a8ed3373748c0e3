"""Invariants of other families' strategies under random predictions: they end, every position is filled, KV becomes
final in order, what has been told as final stays, and no prediction is needed that the plan does not read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attentive import EOS, MASK, Decoded
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rules_that_ship import choose

from common.config import TAKE_ANY_LENGTH, DecodeConfig, FastDllm, MultiBlock
from common.config import problem as sentence_of
from common.decoding import Completion, GenerationRequest, ModelFacts, Predictions, Sampling, Scheduler, StepPlan
from common.decoding.scheduling.advancing import quota
from common.decoding.scheduling.strategies.blocks import filled_share
from common.policies import Filling, shipped
from common.policies.settings import STRATEGIES

VOCAB = 50
EDIT_IDS = 1, 2


def predictions(plan: StepPlan, rng: np.random.Generator, eos_share: float) -> Predictions:
    """Random ones where the plan reads, else such as would be noticed."""
    token_T = rng.integers(EOS + 1, VOCAB, plan.num_tokens)
    token_T[rng.random(plan.num_tokens) < eos_share] = EOS
    probability_T = rng.random(plan.num_tokens, dtype=np.float32)
    best_2CT = np.zeros((0, plan.num_tokens), np.float32)
    if plan.sampling.num_best:
        best_2CT = best_tokens(token_T, probability_T, plan.sampling, rng)
    token_T[~plan.is_read_T], probability_T[~plan.is_read_T] = MASK, np.nan
    best_2CT[:, ~plan.is_read_T] = np.nan
    return Predictions(np.concatenate((Predictions.of(token_T, probability_T, probability_T - 1).values_3T, best_2CT)))


def best_tokens(token_T: Any, probability_T: Any, sampling: Sampling, rng: np.random.Generator) -> Any:
    """The token, or before it one that edits, or the mask where it counts; and others after it."""
    count, special = sampling.num_best, [*EDIT_IDS, *[MASK] * sampling.counts_mask]
    usual = np.arange(EOS + 1, VOCAB)
    others = np.stack([np.concatenate((rng.permutation(special), rng.permutation(usual))) for _ in token_T])
    first_1T, more_CT = others[:, :1].T, others[:, 1 : count - 1].T
    before_CT, after_CT = np.vstack((first_1T, token_T, more_CT)), np.vstack((token_T, first_1T, more_CT))
    tokens_CT = np.where(rng.random(len(token_T)) < 0.3, before_CT, after_CT)
    return np.concatenate((tokens_CT, probability_T * 0.9 ** np.arange(count)[:, None])).astype(np.float32)


DRAWN = ["block_diffusion", "block_diffusion", "fast_dllm_v2", "fast_dllm", "d2f", "multi_block", "levenshtein"]


def test_every_strategy_is_drawn() -> None:
    assert {*DRAWN, "vanilla"} == set(STRATEGIES)  # vanilla is fast_dllm with one block


@st.composite
def configs(draw: st.DrawFn) -> tuple[DecodeConfig, ModelFacts]:
    size = draw(st.sampled_from([2, 4, 8]))
    strategy = draw(st.sampled_from(DRAWN))
    rules = {"d2f": ["threshold", "entropy"], "multi_block": ["entropy"], "levenshtein": ["threshold"]}.get(
        strategy, shipped("fill_rules")
    )
    rule = draw(st.sampled_from(rules))
    if rule in ("static", "dynamic", "sequential"):
        rule = f"{rule}(steps={draw(st.integers(1, size))})"
    if rule == "entropy":
        rule = f"entropy(below={draw(st.floats(0.01, 1))})"
    own: dict[str, Any] = {
        "block_size": size, "max_new_tokens": size * draw(st.integers(1, 4)) + draw(st.integers(0, 3)),
        "num_lookahead": draw(st.integers(0, 5)), "skip_threshold": draw(st.floats(0.3, 1)), "fill_rule": rule,
        "stop_at_eos": draw(st.booleans()), "spawn_rule": draw(st.sampled_from(["confident", "confident(blocks=1)"])),
    }  # fmt: skip
    keys: dict[str, Any] = {"name": strategy}
    if strategy == "multi_block":
        keys["cache_delay"] = draw(st.integers(0, 4))
    if strategy == "block_diffusion":
        keys["commit"] = draw(st.sampled_from(["fused", "separate"]))
        keys["cache"] = draw(st.sampled_from(["prefix", "none"]))
        if draw(st.booleans()):
            keys |= {"edit_threshold": draw(st.floats(0.5, 1)), "max_post_edit_steps": draw(st.integers(0, 3))}
        elif keys["commit"] == "fused" and keys["cache"] == "prefix":
            own["block_add_threshold"] = draw(st.sampled_from([1.0, 0.5]))
    if strategy == "fast_dllm_v2":
        keys |= {"sub_block_size": draw(st.sampled_from([None, 2])), "cache": draw(st.sampled_from(["prefix", "dual"]))}
    if strategy == "fast_dllm":
        keys["cache"] = draw(st.sampled_from(["prefix", "dual", "none"]))
        keys |= draw(st.sampled_from([{}, {"min_block_steps": 2}, {"max_block_steps": 2}]))
    if strategy in ("block_diffusion", "fast_dllm_v2"):
        keys["end_at"] = draw(st.sampled_from(["token", "block"]))
    if strategy == "levenshtein":
        keys |= {"variant": draw(st.sampled_from(["checkpoint", "fluxserve", "sglang"]))}
        keys |= {"edit_threshold": draw(st.floats(0.5, 1)), "max_post_edit_steps": draw(st.integers(0, 3))}
    decode = DecodeConfig.model_validate({**own, "strategy": keys})
    shift = {"fast_dllm_v2": 1, "levenshtein": 0}.get(strategy)
    return decode, ModelFacts(draw(st.sampled_from([0, 1])) if shift is None else shift, edit_ids=EDIT_IDS)


class Chance:
    """A model of random predictions; it has no keys to commit."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def forward(self, plan: StepPlan) -> Predictions:
        return predictions(plan, self._rng, 0.02)

    def commit(self, plan: StepPlan, winner_N: Any) -> None:
        pass


def decoded_at_random(decode: DecodeConfig, facts: ModelFacts, seed: int, lengths: list[int]) -> Decoded:
    return Decoded(decode, facts, lengths, Chance(seed), watches=True)


@settings(max_examples=120)
@given(config=configs(), seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 11), min_size=1, max_size=4))
def test_requests_end_and_what_was_final_stays(
    config: tuple[DecodeConfig, ModelFacts], seed: int, lengths: list[int]
) -> None:
    decode, facts = config
    decoded = decoded_at_random(decode, facts, seed, lengths)
    assert len(decoded.completions) == len(lengths)
    may_leave_masks = isinstance(decode.strategy, FastDllm) and decode.strategy.max_block_steps is not None
    for name, completion in decoded.completions.items():
        assert completion.finish_reason in ("eos", "length")
        assert completion.token_ids[: len(decoded.told.get(name, ()))] == decoded.told.get(name, ())
        assert len(completion.canvas_token_ids) <= decode.max_new_tokens
        assert MASK not in completion.token_ids and EOS not in completion.token_ids[:-1]
        if completion.finish_reason == "length" and EOS not in completion.canvas_token_ids and not may_leave_masks:
            whole = decode.max_new_tokens
            if decode.strategy.name not in TAKE_ANY_LENGTH:
                whole = whole // decode.block_size * decode.block_size
            assert len(completion.token_ids) == whole


@settings(max_examples=80)
@given(config=configs(), seed=st.integers(0, 2**32), length=st.integers(1, 11))
def test_final_kv_is_written_once_in_order_and_never_of_a_mask(
    config: tuple[DecodeConfig, ModelFacts], seed: int, length: int
) -> None:
    decode, facts = config
    if not decode.strategy.is_from_zero:
        return
    decoded, end = decoded_at_random(decode, facts, seed, [length]), 0
    for plan in decoded.plans:
        if decode.strategy.name == "fast_dllm_v2":
            plan = plan._replace(commits=plan.commits if plan.commits_locally else ())
        for span in plan.commits:
            assert span.start == end and span.length > 0
            end = span.start + span.length
            assert end % decode.block_size == 0
            for row in range(plan.num_rows):
                first = plan.first_R[row]
                assert MASK not in plan.token_T[first : first + span.length]
    if decode.strategy.cached == "none":
        assert end == 0


@settings(max_examples=60)
@given(config=configs(), seed=st.integers(0, 2**32), length=st.integers(1, 11))
def test_attention_ends_with_the_block(config: tuple[DecodeConfig, ModelFacts], seed: int, length: int) -> None:
    decode, facts = config
    if not decode.strategy.is_from_zero:
        return
    for plan in decoded_at_random(decode, facts, seed, [length]).plans:
        assert (plan.horizon_T == (plan.position_T // decode.block_size + 1) * decode.block_size).all()


@pytest.mark.parametrize("num_lookahead", [0, 2])
@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_a_block_waits_before_its_kv_is_kept_and_meanwhile_passes_compute_everything(
    delay: int, num_lookahead: int
) -> None:
    decode = DecodeConfig(
        strategy=MultiBlock(cache_delay=delay), fill_rule="entropy(below=0.3)", block_size=4,
        num_lookahead=num_lookahead, max_new_tokens=24, eos_token_id=-1,
    )  # fmt: skip
    prompt, masked, full_since, cached = 7, set(range(7, 31)), {7: 0}, 0
    records = decoded_at_random(decode, ModelFacts(0), 3, [prompt]).records
    for number, record in enumerate(records, start=1):
        for end in range(prompt, 31, 4):
            if not any(position < end for position in masked):
                full_since.setdefault(end, number)
        ready = max([end for end, since in full_since.items() if number - since >= delay], default=0)
        is_waiting = max(full_since) > ready
        start = 0 if is_waiting and ready <= cached else cached
        assert (record.start, record.start + record.commit_length) == (start, max(ready, cached))
        assert set(record.window_lengths) == {31 - start}, "the canvas is whole"
        cached = max(ready, cached)
        masked -= set(record.filled)
        if not record.winner_is_anchor:
            masked.remove(
                records[number - 2].lookahead[record.branch_scores.index(max(record.branch_scores))].fills[0][0]
            )
    assert not masked


def test_masks_of_blocks_that_are_not_open_are_not_read() -> None:
    decode = DecodeConfig(strategy="multi_block", fill_rule="entropy", block_size=4, max_new_tokens=24)
    plan = decoded_at_random(decode, ModelFacts(0), 3, [7]).plans[0]
    assert plan.position_T[plan.is_read_T].tolist() == [7, 8, 9, 10] and len(plan.position_T) == 31


@pytest.mark.parametrize("strategy", ["block_diffusion", "fast_dllm_v2"])
def test_without_the_early_stop_the_block_of_the_end_token_is_the_last(strategy: Any) -> None:
    decode = DecodeConfig(strategy=strategy, block_size=4, max_new_tokens=16, stop_at_eos=False)
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, facts=ModelFacts(int(strategy[0] == "f")))
    scheduler.admit(GenerationRequest("a", (10, 11, 12, 13, 14)))
    ended: list[Completion] = []
    while not ended:
        plan = scheduler.plan_step()
        ones_T = np.ones(plan.num_tokens)
        ended = scheduler.advance(scheduler.select_winners(Predictions.of(EOS * ones_T, ones_T, ones_T)))
    assert ended[0].token_ids == (EOS,) and ended[0].canvas_token_ids == (EOS,) * 3


@pytest.mark.parametrize(
    ("rule", "changes", "expected"),
    [
        ("threshold", {"skip_threshold": 0.65}, [0, 3]),
        ("threshold", {"skip_threshold": 0.95}, [3]),
        ("static", {}, [0, 3]),
        ("dynamic", {"skip_threshold": 0.45}, [0, 1, 3]),
        ("dynamic", {"skip_threshold": 0.85}, [0, 3]),
        ("sequential", {}, [0, 1]),
        ("entropy_bounded(bound=0.45)", {}, [0, 3]),
        ("entropy_bounded(bound=0.01)", {}, [3]),
        ("entropy(below=0.6)", {}, [0, 1, 3]),
        ("entropy(below=0.05)", {}, [3]),
        ("factor(f=0.5)", {}, [3]),  # 0.7 is below 1 - 0.5 / 3
        ("factor", {}, [0, 3]),  # 0.5 is below 1 - 1 / 4
        ("factor(f=2)", {}, [0, 1, 2, 3]),  # 0.2 is the first below 1 - 2 / 5, and the last
    ],
)
def test_fill_rules(rule: str, changes: dict[str, Any], expected: list[int]) -> None:
    probability_M = np.array([0.7, 0.5, 0.2, 0.9], dtype=np.float32)
    decode = DecodeConfig(strategy="block_diffusion", **changes)
    values_3BM = np.stack((probability_M, probability_M, probability_M - 1))[:, None]
    assert choose(rule, Filling(values_3BM, 0, 2, decode)) == expected


def test_a_quota_fills_a_block_in_its_steps() -> None:
    assert [quota(16, 6, step) for step in range(6)] == [3, 3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("settings_", "problem"),
    [
        ({"strategy": "block_diffusion", "window_attention": "full"}, "block-causal attention"),
        (
            {"strategy": {"name": "fast_dllm", "commit": "separate"}},
            "key of strategy block_diffusion, not of fast_dllm",
        ),
        ({"strategy": {"name": "fast_dllm_v2", "commit": "separate"}}, "not of fast_dllm_v2: remove it"),
        ({"strategy": "fast_dllm_v2", "block_add_threshold": 0.5}, "begins a block with the token"),
        ({"strategy": "fast_dllm_v2", "block_size": 1}, "nothing to fill"),
        ({"strategy": {"name": "fast_dllm_v2", "sub_block_size": 5}}, "does not divide block_size"),
        (
            {"strategy": "block_diffusion", "fill_rule": "entropy_bounded", "sampling_strategy": "default"},
            "neg_entropy",
        ),
        (
            {"strategy": {"name": "block_diffusion", "edit_threshold": 0.5}, "block_add_threshold": 0.5},
            "set block_add_threshold",
        ),
        ({"strategy": {"name": "block_diffusion", "penalty_lambda": 1.0}}, "only acts with edit_threshold"),
        ({"strategy": "block_diffusion", "fill_rule": "threshold(steps=4)"}, "threshold takes no numbers"),
        ({"strategy": {"name": "fast_dllm", "cfg_scale": 1.0}}, "cfg_scale needs cache none"),
        ({"strategy": "d2f", "fill_rule": "static"}, "not for d2f"),
        ({"strategy": {"name": "d2f", "cache": "none"}}, "a key of strategy fast_dllm and block_diffusion and"),
        ({"strategy": "multi_block"}, "set fill_rule to entropy"),
        ({"strategy": "multi_block", "fill_rule": "entropy", "sampling_strategy": "default"}, "neg_entropy"),
        ({"strategy": "multi_block", "fill_rule": "entropy", "window_attention": "block_causal"}, "its whole canvas"),
        ({"strategy": {"name": "multi_block", "cache": "dual"}, "fill_rule": "entropy"}, "not of multi_block: remove"),
        ({"strategy": {"name": "d2f", "cache_delay": 2}}, "it is a key of strategy multi_block, not of d2f"),
        ({"strategy": {"name": "fast_dllm", "min_block_steps": 3, "max_block_steps": 2}}, "is below min_block_steps"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings_: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        DecodeConfig(**settings_)
    assert problem in sentence_of(refused.value, DecodeConfig)


def test_a_share_that_is_met_is_not_missed_by_rounding() -> None:
    share = getattr(filled_share, "__wrapped__", filled_share)
    for length in range(1, 129):
        for num_filled in range(length + 1):
            block = SimpleNamespace(num_masked=length - num_filled, start=7, end=7 + length)
            assert share(block, 0) == num_filled / length
            assert share(block, length - num_filled) == 1.0
