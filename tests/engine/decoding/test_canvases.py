"""Texts that stand in an answer or after it: they stay, the model sees them, and holes get no end tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.checkpoint import load_model_config, load_weights
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.constraints import Automaton, Compiler, Format, made
from common.decoding import HOLE, Completion, GenerationRequest, Rejection, Scheduler, decode_requests
from common.platforms import build_engine
from common.runtime import facts_of
from tests.reference import PlainModel

MODEL = Path(__file__).parents[2] / "golden" / "model_a"
CPU = DeviceProfile(name="one", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=128)
EOS, VOCAB = 1, load_model_config(MODEL).vocab_size
SHARED = {"block_size": 8, "max_new_tokens": 24, "shift_row": "fresh", "sampling_strategy": "neg_entropy"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "vanilla": {"strategy": "vanilla"},
    "prefix": {"strategy": "fast_dllm"},
    "dual": {"strategy": {"name": "fast_dllm", "cache": "dual"}},
    "none": {"strategy": {"name": "fast_dllm", "cache": "none"}},
    "multi_block": {"strategy": "multi_block", "fill_rule": "entropy"},
}
CANVASES = {
    "suffix": (HOLE,) * 9 + (40, 41, 42),
    "holes": (30, 31, HOLE, HOLE, 32, *(HOLE,) * 7, *range(50, 62)),  # the last block is full
    "whole block between": (HOLE, *range(70, 85), HOLE, HOLE),
    "begins full": (*range(90, 100), HOLE, 5),
}


@cache
def engine_of(name: str) -> Any:
    decode = DecodeConfig.model_validate({**SHARED, **STRATEGIES[name], "num_lookahead": 3})
    return build_engine(CPU, RunConfig(model=str(MODEL), decode=decode, max_num_requests=4))


def anything() -> Automaton:
    return Automaton(
        np.ones(VOCAB, np.int32), np.array([[-1, 0]], np.int32), np.ones(1, np.bool_), 0, "any", may_end=False
    )


def request(name: str, canvas: tuple[int, ...], prompt: int = 10, shown: int | None = None) -> GenerationRequest:
    return GenerationRequest(
        name, tuple(range(prompt, prompt + 11)), max_tokens=shown or len(canvas), automaton=anything(), canvas=canvas
    )


def decoded(name: str, k: int, *requests: GenerationRequest, temperature: float = 0.0, **more: Any) -> list[Any]:
    config, changed = load_model_config(MODEL), {"num_lookahead": k, "temperature": temperature, "skip_threshold": 0.3}
    decode = DecodeConfig.model_validate({**SHARED, **changed, **STRATEGIES[name], **more})
    scheduler = Scheduler(
        decode, mask_token_id=config.mask_of(None), eos_token_id=EOS, num_slots=4, facts=facts_of(config)
    )
    found = {one.id: one for one in decode_requests(iter(requests), scheduler, engine_of(name))}
    return [found[one.id] for one in requests]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("k", "temperature"), [(0, 0.0), (3, 0.0), (3, 0.9)])
def test_what_is_given_stays_and_holes_are_filled(name: str, k: int, temperature: float) -> None:
    requests = [request(canvas, CANVASES[canvas]) for canvas in CANVASES]
    plain = GenerationRequest("plain", tuple(range(10, 21)))
    *ended, other = decoded(name, k, *requests, plain, temperature=temperature)
    for one, asked in zip(ended, requests, strict=True):
        assert isinstance(one, Completion) and one.finish_reason == "eos"
        assert len(one.token_ids) == len(asked.canvas or ())
        for token, given in zip(one.token_ids, asked.canvas or (), strict=True):
            assert token == given if given != HOLE else token not in (EOS, load_model_config(MODEL).mask_of(None))
    for alone, one in zip([*requests, plain], [*ended, other], strict=True):
        assert decoded(name, k, alone, temperature=temperature)[0].token_ids == one.token_ids


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_model_sees_what_stands_after_the_hole(name: str) -> None:
    first, second = (
        decoded(name, 0, request("a", (HOLE,) * 4 + tuple(range(begin, begin + 12)), shown=4))[0]
        for begin in (100, 200)
    )
    assert len(first.token_ids) == 4 and first.token_ids != second.token_ids


def test_one_token_a_pass_is_what_the_model_predicts_of_the_whole_canvas() -> None:
    """Against plain forwards: the most confident mask is filled with its most probable token."""
    config = load_model_config(MODEL)
    mask, shift = config.mask_of(None), facts_of(config).shift
    tokens = [*range(10, 21), *(mask,) * 5, 40, 41, 42, *(EOS,) * 16]
    while mask in tokens:
        plain = PlainModel(config, load_weights(MODEL, config, tp_rank=0, tp_size=1, dtype=torch.float32))
        logits = plain.forward(tokens, 0, [len(tokens)] * len(tokens), set(), set())
        logits[:, EOS] = -torch.inf
        best, token = logits.softmax(dim=-1).max(dim=-1)
        at = max((at for at, one in enumerate(tokens) if one == mask), key=lambda at: float(best[at - shift]))
        tokens[at] = int(token[at - shift])
    asked = request("a", (HOLE,) * 5 + (40, 41, 42), shown=5)
    (one,) = decoded("vanilla", 0, asked, skip_threshold=1.0, sampling_strategy="default")
    assert list(one.token_ids) == tokens[11:16]


@pytest.mark.parametrize(("name", "k"), [("vanilla", 0), ("prefix", 3), ("multi_block", 3)])
def test_options_are_as_probable_as_the_first_pass_says(name: str, k: int) -> None:
    """Against a plain forward: the log probabilities of an option's tokens and of the end token after them."""
    config, texts = load_model_config(MODEL), ["ab", "b", "abba"]
    options = tuple(tuple(2 + byte for byte in text.encode()) for text in texts)
    compiler = Compiler(lambda: {2 + byte: bytes([byte]) for byte in range(256)}, VOCAB, made)
    automaton = compiler.automaton(Format("choice", json.dumps(texts))).apart([100, 99, 100])
    prompt, mask, shift = tuple(range(10, 21)), config.mask_of(None), facts_of(config).shift
    asked = GenerationRequest("a", prompt, max_tokens=8, automaton=automaton, options=options)
    (one,) = decoded(name, k, asked)
    plain = PlainModel(config, load_weights(MODEL, config, tp_rank=0, tp_size=1, dtype=torch.float32))
    length = len(prompt) + 24
    logits = plain.forward([*prompt, *(mask,) * 24], 0, [length] * length, set(), set())
    logprob = logits.log_softmax(dim=-1)
    wanted = [
        sum(float(logprob[len(prompt) + at - shift, token]) for at, token in enumerate((*option, EOS)))
        for option in options
    ]
    assert one.option_logprobs == pytest.approx(wanted, abs=1e-4)
    assert decoded(name, k, asked, GenerationRequest("b", prompt))[0].option_logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request("a", (HOLE,) * 25), "its 25 tokens are more than max_new_tokens 24"),
        (request("a", (HOLE, EOS, 5)), "holds the token 1, which ends an answer"),
    ],
)
def test_what_no_canvas_is_is_refused(asked: GenerationRequest, why: str) -> None:
    (one,) = decoded("vanilla", 0, asked)
    assert isinstance(one, Rejection) and why in one.reason
