"""Drafts: several tokens a branch, and rules that accept them."""

from __future__ import annotations

from typing import Any

import pytest
from attentive import MASK, Attentive, Canvas, Decoded, decoded_as, filled
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from common.config import DecodeConfig
from common.decoding import ModelFacts
from common.policies import shipped
from tests.soaking import SOAKS

STRATEGIES = ["d2f", "d2f", "block_diffusion", "fast_dllm", "fast_dllm_v2", "multi_block", "vanilla"]


@st.composite
def lossless(draw: st.DrawFn) -> tuple[dict[str, Any], ModelFacts]:
    """Settings for which `exact` holds, without lookaheads."""
    name, size = draw(st.sampled_from(STRATEGIES)), draw(st.sampled_from([2, 4, 8]))
    one_block = sorted({*shipped("fill_rules")} - {"agreed"})
    rules = {"d2f": ["threshold", "entropy"], "multi_block": ["entropy"]}.get(name, one_block)
    strategy: dict[str, Any] = {"name": name}
    found: dict[str, Any] = {
        "block_size": size, "max_new_tokens": size * draw(st.integers(1, 5)), "strategy": strategy,
        "skip_threshold": draw(st.sampled_from([0.3, 0.6, 0.8, 0.95])), "fill_rule": draw(st.sampled_from(rules)),
        "shift_row": draw(st.sampled_from(["stale", "fresh"])), "stop_at_eos": draw(st.booleans()),
        "decoded_token_threshold": draw(st.sampled_from([0.3, 0.95])), "num_lookahead": 0,
    }  # fmt: skip
    if name in ("d2f", "multi_block"):
        found["block_add_threshold"] = draw(st.sampled_from([0, 0.1, 0.5, 1]))
    if name == "d2f":
        found["window_attention"] = draw(st.sampled_from(["full", "block_causal"]))
    if name == "multi_block":
        strategy["cache_delay"] = draw(st.integers(0, 3))
    if name == "fast_dllm":
        strategy["cache"] = draw(st.sampled_from(["prefix", "dual", "none"]))
    if name == "fast_dllm_v2":
        strategy["sub_block_size"] = draw(st.sampled_from([None, 2]))
    if name in ("block_diffusion", "fast_dllm_v2"):
        strategy["end_at"] = draw(st.sampled_from(["token", "block"]))
    shift = 1 if name == "fast_dllm_v2" else draw(st.sampled_from([0, 1]))
    if name == "block_diffusion":
        strategy |= {
            "commit": draw(st.sampled_from(["fused", "separate"])),
            "cache": draw(st.sampled_from(["prefix", "none"])),
        }
        if not shift and draw(st.booleans()):
            strategy |= {
                "edit_threshold": draw(st.sampled_from([0.5, 0.9])),
                "max_post_edit_steps": draw(st.integers(0, 3)),
            }
        elif strategy["commit"] == "fused" and strategy["cache"] == "prefix":
            found["block_add_threshold"] = draw(st.sampled_from([1.0, 0.5]))
    try:
        DecodeConfig.model_validate(found)
    except ValidationError:
        assume(False)
    return found, ModelFacts(shift)


@pytest.mark.slow
@settings(max_examples=200 if SOAKS else 60, deadline=None)
@given(
    config=lossless(), seed=st.integers(0, 2**20), k=st.integers(1, 7), watches=st.booleans(),
    ends=st.sampled_from([0, 1, 8]), spawn=st.sampled_from(["nested", "nested", "confident"]),
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=3),
)  # fmt: skip
def test_exact_drafts_change_no_token(
    config: tuple[dict[str, Any], ModelFacts], seed: int, k: int, watches: bool, ends: int, spawn: str,
    lengths: list[int],
) -> None:  # fmt: skip
    plain, facts = config
    drafted = {**plain, "num_lookahead": k, "spawn_rule": spawn, "branch_score": "exact"}
    model = [Attentive(seed, facts.shift, eos_of_64=ends) for _ in range(2)]
    wanted = Decoded(DecodeConfig.model_validate(plain), facts, lengths, model[0])
    found = Decoded(DecodeConfig.model_validate(drafted), facts, lengths, model[1], watches)
    assert found.tokens == wanted.tokens
    assert found.num_forwards <= wanted.num_forwards


def by_freedave(is_equal: bool) -> Any:
    """FreeDave's verification (generation/core.py, draft_verification): the largest later draft that agrees with the
    target of the one held, until none does."""

    def accept(drafts: list[Canvas], targets: list[Canvas], told: list[Any]) -> int:
        def agrees(draft: Canvas, target: Canvas) -> bool:
            pairs = zip(draft, target, strict=True)
            return draft == target if is_equal else all(a in (b, MASK) for a, b in pairs)

        best = 0
        while later := [j for j in range(best + 1, len(drafts)) if agrees(drafts[j], targets[best])]:
            best = later[-1]
        return best

    return accept


def by_psd(drafts: list[Canvas], targets: list[Canvas], told: list[Any]) -> int:
    """PSD's hierarchical acceptance: the deepest draft all of whose tokens the draft before each predicts."""
    for depth in range(1, len(drafts)):
        before, now = drafts[depth - 1], drafts[depth]
        (place,) = (place for place in range(len(now)) if now[place] != before[place])
        if told[depth - 1][0, place] != now[place]:
            return depth - 1
    return len(drafts) - 1


def decoded_plainly(model: Attentive, prompt: Canvas, count: int, threshold: float, k: int, accept: Any) -> Any:
    canvas, drafts, passes = [], [prompt + [MASK] * count], 0
    while MASK in drafts[0]:
        told, passes = [model.read(draft) for draft in drafts], passes + 1
        targets = [filled(draft, one, threshold) for draft, one in zip(drafts, told, strict=True)]
        best = accept(drafts, targets, told)
        canvas, drafts = targets[best], [targets[best]]
        masks = [place for place, token in enumerate(canvas) if token == MASK]
        for place in sorted(masks, key=lambda place: -told[best][2, place])[:k]:
            drafts.append([*drafts[-1][:place], int(told[best][0, place]), *drafts[-1][place + 1 :]])
    return canvas, passes


@pytest.mark.parametrize(
    ("score", "accept"), [("exact", by_freedave(True)), ("subset", by_freedave(False)), ("agreement", by_psd)]
)
def test_drafts_are_accepted_as_published(score: str, accept: Any) -> None:
    saved = 0
    for seed in range(40):
        k, threshold, prompt = 1 + seed % 7, (0.5, 0.8, 0.95)[seed % 3], [7, 8, 9]
        wanted, passes = decoded_plainly(Attentive(seed, 0), prompt, 12, threshold, k, accept)
        own = {"num_lookahead": k, "skip_threshold": threshold, "spawn_rule": "nested", "branch_score": score}
        decoded_as(wanted, passes, seed, **own)
        saved += decoded_plainly(Attentive(seed, 0), prompt, 12, threshold, 0, accept)[1] - passes
    assert saved > 40


def test_drafts_that_could_not_be_compared_are_refused_in_a_sentence() -> None:
    for changes, sentence in (
        ({"temperature": 0.5}, "set temperature to 0"),
        ({"fill_rule": "agreed"}, "set it to threshold"),
        ({"strategy": {"name": "fast_dllm", "max_block_steps": 2}}, "remove min_block_steps"),
        ({"strategy": "fast_dllm", "fill_rule": "static(steps=5)"}, "set its steps to a divisor"),
        ({"strategy": {"name": "fast_dllm_v2", "cache": "dual"}}, "set cache to prefix"),
        ({"strategy": "levenshtein"}, "levenshtein moves tokens"),
    ):
        with pytest.raises(ValidationError, match=sentence):
            DecodeConfig.model_validate({"branch_score": "exact", **changes})
