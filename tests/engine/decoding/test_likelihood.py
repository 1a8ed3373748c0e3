"""The likelihood of a text against the same sum over all of its maskings, each computed by itself."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest
import torch

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import RowField, Sampling, StepPlan, TextScorer
from common.decoding.likelihood import _strata
from common.errors import ConfigError
from common.platforms import build_engine
from tests.telling import FAMILIES, MASK, MODELS

PROMPT = [(7 * n + 3) % 490 for n in range(21)]
TEXT = [(11 * n + 5) % 490 for n in range(15)]


def scorer_of(profile: DeviceProfile, name: str, num_maskings: int) -> tuple[TextScorer, Any, int]:
    model, own = FAMILIES[name]
    config = load_model_config(MODELS / model)
    decode = DecodeConfig.model_validate({"max_new_tokens": 48, **own, "num_lookahead": 0, "eos_token_id": -1})
    engine: Any = build_engine(profile, RunConfig(model=str(MODELS / model), decode=decode, max_num_requests=8))
    scorer = TextScorer(
        engine, decode, mask_token_id=MASK, shift=config.shift, num_maskings=num_maskings, seed=1, most_tokens=400
    )
    return scorer, engine, config.shift


def of_masking(engine: Any, shift: int, tokens: list[int], masked: list[int], horizons: list[int]) -> float:
    """Sum of the log probabilities of the tokens at these positions, where all else is as it is."""
    heard: list[np.ndarray] = []
    hook = engine.model.lm_head.register_forward_hook(lambda *given: heard.append(given[-1].float().numpy().copy()))
    length, shown = len(tokens), [MASK if place in masked else token for place, token in enumerate(tokens)]
    fields_8R = np.zeros((len(RowField), 1), dtype=np.int64)
    fields_8R[[RowField.NUM_ENTRIES, RowField.NUM_KEYS]] = length
    entries_3T = np.stack((shown, np.arange(length), np.minimum(horizons, length)))
    engine.forward(
        StepPlan(
            entries_3T, np.ones(length, np.bool_), fields_8R, np.zeros(1, np.int64), (), Sampling("default", -1),
            horizons[0] < length,
        )
    )  # fmt: skip
    hook.remove()
    logits_TV = torch.from_numpy(heard[0])
    logits_TV[:, MASK] = -torch.inf
    logprob_TV = logits_TV.double().log_softmax(-1)
    return sum(float(logprob_TV[place - shift, tokens[place]]) for place in masked)


def over_all_maskings(engine: Any, shift: int, tokens: list[int], begin: int, end: int, horizons: list[int]) -> float:
    length, total = end - begin, 0.0
    for count in range(1, length + 1):
        for masked in combinations(range(begin, end), count):
            found = of_masking(engine, shift, tokens, list(masked), horizons)
            total += found * length / count / comb(length, count) / length
    return total


@pytest.mark.parametrize(
    ("prompt", "text", "reason"),
    [
        ([], TEXT, "prompt is empty"),
        (PROMPT, [], "text is empty"),
        (PROMPT, [99_999], "no token of the model"),
        ([99_999], TEXT, "no token of the model"),
        (PROMPT, [-5], "no token of the model"),
        (PROMPT, [MASK], "mask token"),
        (PROMPT * 1000, TEXT, "positions, and"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_what_is_no_text_gets_no_number(cpu: DeviceProfile, prompt: list[int], text: list[int], reason: str) -> None:
    scorer, _, _ = scorer_of(cpu, "llada dual", 2)
    with pytest.raises(ConfigError, match=reason):
        list(scorer.scores([(PROMPT, TEXT), (prompt, text)]))
    assert len(list(scorer.scores([(PROMPT, TEXT)]))) == 1


def test_with_full_attention_the_text_is_one_piece(cpu: DeviceProfile) -> None:
    scorer, engine, shift = scorer_of(cpu, "llada dual", 200)
    prompt, text = PROMPT, TEXT[:5]
    (found,) = scorer.scores([(prompt, text)])
    length = len(prompt) + len(text)
    wanted = over_all_maskings(engine, shift, prompt + text, len(prompt), length, [length] * length)
    assert found.num_rows == 200 and found.standard_error is not None and 0 < found.standard_error < -0.04 * wanted
    assert abs(found.logprob - wanted) < 4 * found.standard_error


@pytest.mark.parametrize(
    ("name", "prompt"), [("sdar fused", [*PROMPT, *range(8)]), ("fast_dllm_v2 dual", [*PROMPT, *range(8)]),
    ("llada d2f", PROMPT)],
)  # fmt: skip
def test_with_block_causal_attention_it_is_one_of_each_block(cpu: DeviceProfile, name: str, prompt: list[int]) -> None:
    """Each block is estimated after whole ones; what the last one has beyond the text stays masked. Two texts lie in
    two blocks."""
    scorer, engine, shift = scorer_of(cpu, name, 200)
    origin, size, text = len(PROMPT) if name == "llada d2f" else 0, 16, TEXT[:6]
    (found,) = scorer.scores([(prompt, text)])
    end, wanted, begin = len(prompt) + len(text), 0.0, len(prompt)
    while begin < end:
        block_end = (begin - origin) // size * size + size + origin
        last = min(block_end, end)
        tokens = (prompt + text)[:last] + [MASK] * (block_end - last)
        horizons = [max((place - origin) // size + 1, 0) * size + origin for place in range(block_end)]
        wanted += over_all_maskings(engine, shift, tokens, begin, last, horizons)
        begin = last
    assert found.standard_error is not None and 0 < found.standard_error < -0.04 * wanted
    assert abs(found.logprob - wanted) < 4 * found.standard_error


def test_many_texts_come_in_their_order_whatever_shares_a_pass(cpu: DeviceProfile) -> None:
    scorer, engine, _ = scorer_of(cpu, "sdar fused", 5)
    texts = [(PROMPT[: 3 + 2 * n], TEXT[: 1 + n]) for n in range(9)]
    found = list(scorer.scores(texts))
    alone = TextScorer(
        engine, scorer._decode, mask_token_id=MASK, shift=0, num_maskings=5, seed=1, most_tokens=1
    )  # fmt: skip
    for one, again in zip(found, alone.scores(texts), strict=True):
        assert one.logprob == pytest.approx(again.logprob, abs=1e-4) and one.num_rows == again.num_rows
    assert found[0].num_rows == 1 and found[0].standard_error == 0, "a single token has one masking"


def test_one_masking_of_several_tokens_has_no_standard_error(cpu: DeviceProfile) -> None:
    scorer, *_ = scorer_of(cpu, "llada dual", 1)
    (found,) = scorer.scores([(PROMPT, TEXT[:3])])
    assert found.standard_error is None and found.num_rows == 1


@pytest.mark.parametrize(("prompt", "text"), [([], [1]), ([1], []), ([1] * 250, [1] * 7), ([1], [512])])
def test_what_cannot_be_scored_has_a_sentence(cpu: DeviceProfile, prompt: list[int], text: list[int]) -> None:
    scorer, *_ = scorer_of(cpu.model_copy(update={"max_model_len": 256}), "llada dual", 1)
    assert scorer.why_not(prompt, text) and scorer.why_not([1], [2]) is None


@pytest.mark.parametrize(("length", "count"), [(1, 128), (5, 3), (17, 128), (300, 8)])
def test_strata_are_those_of_the_published_evaluation(length: int, count: int) -> None:
    found = _strata(length, count, np.random.default_rng(0))
    if length == 1:
        assert found.tolist() == [1]
        return
    start = int(np.random.default_rng(0).integers(1, length + 1))
    x = torch.round(torch.linspace(float(start), start + (count - 1) * (length / count), steps=count)).long()
    assert found.tolist() == (((x - 1) % length) + 1).tolist() and found.min() >= 1 and found.max() <= length
