"""Answers under a `logit_bias`: those of a model whose head adds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_formats import CASES, CPU, EOS, HELD, MASK, MODELS
from torch import nn

from common.checkpoint import load_model_config
from common.config import DecodeConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection, Scheduler, decode_requests
from common.platforms import build_engine
from common.requests import Wishes
from common.requests.canvases import any_text
from common.runtime import facts_of

Bias = tuple[tuple[int, float], ...]
BIAS: Bias = tuple((token, (1.5, -5.0, 0.5, -100.0)[token % 4]) for token in range(20, 500, 7))


def answers(name: str, bias: Bias, settings: dict[str, Any], head_bias: Bias = ()) -> list[Completion | Rejection]:
    """Decode four prompts, of which the last has no bias. head_bias: what the model's head adds."""
    model, own = CASES[name]
    decode = DecodeConfig.model_validate(
        {"skip_threshold": 0.3, "sampling_strategy": "neg_entropy", "max_new_tokens": 32, **own, "eos_token_id": EOS,
         **settings}
    )  # fmt: skip
    engine: Any = build_engine(CPU, RunConfig(model=str(MODELS / model), decode=decode, max_num_requests=4))
    if head_bias:
        head = engine.model.lm_head
        bias_V = torch.zeros(len(head.weight))
        bias_V[[token for token, _ in head_bias]] = torch.tensor([value for _, value in head_bias])
        head.bias = nn.Parameter(bias_V, requires_grad=False)
    scheduler = Scheduler(
        decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=4, facts=facts_of(load_model_config(MODELS / model))
    )
    own_decode, automaton = any_text(Wishes(), decode, 512, "logit_bias")
    automaton = automaton.apart([token for token, _ in bias])
    requests = [  # prompts of whole blocks: what a canvas has after the answer is not biased
        GenerationRequest(
            str(number), tuple(range(10 + number, 42 + number)), own_decode, automaton=automaton, logit_bias=bias
        )
        for number in range(3)
    ]
    requests.append(GenerationRequest("plain", tuple(range(30, 50))))
    found = {one.id: one for one in decode_requests(iter(requests), scheduler, engine)}
    return [found[request.id] for request in requests]


def text_of(found: Completion | Rejection) -> tuple[int, ...]:
    """Return the tokens before the end token."""
    assert isinstance(found, Completion)
    end = found.token_ids.index(EOS) if EOS in found.token_ids else None
    return found.token_ids[:end]


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_lookahead": 0, "temperature": 0.0},
        {"num_lookahead": 3, "temperature": 0.8},
        {"num_lookahead": 3, "temperature": 0.8, "temperature_acts_on": "draw_and_confidence"},
    ],
    ids=["greedy", "drawn", "tempered"],
)
def test_a_bias_is_added_to_logits(name: str, settings: dict[str, Any]) -> None:
    *biased, plain = answers(name, BIAS, settings)
    *expected, _ = answers(name, tuple((token, 0.0) for token, _ in BIAS), settings, BIAS)
    *unbiased, alone = answers(name, tuple((token, 0.0) for token, _ in BIAS), settings)
    texts = [list(map(text_of, run)) for run in (biased, expected, unbiased)]
    assert texts[0] == texts[1] != texts[2]
    assert text_of(plain) == text_of(alone)


def test_end_tokens_have_one_bias() -> None:
    ends = {"eos_token_id": EOS, "stop_token_ids": (7,)}
    for bias in (((EOS, -100.0),), ((EOS, -100.0), (7, 2.0))):
        found = answers(HELD[0], bias, ends)
        assert all(isinstance(one, Rejection) and "the end tokens 1, 7 count as one" in one.reason for one in found[:3])
        assert isinstance(found[3], Completion)
    many = answers(HELD[0], ((EOS, -100.0),), {"eos_token_id": EOS, "stop_token_ids": tuple(range(2, 16))})
    assert "the end tokens 1, 2, 3, 4, 5, 6, 7, 8 and 7 more count as one" in getattr(many[0], "reason", "")
    kept_from_ending = answers(HELD[0], ((EOS, -100.0), (7, -100.0)), ends)
    assert all(isinstance(one, Completion) and not {EOS, 7} & {*one.token_ids} for one in kept_from_ending)
