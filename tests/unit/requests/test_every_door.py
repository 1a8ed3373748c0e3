"""A prompt and wishes mean one request, or are refused with one sentence, whichever door they come through."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scripted import ScriptedTokenizer

from common.batch.inputs import InputLine, _problem
from common.batch.lines import LineRequests
from common.config import DecodeConfig, InputConfig, RunConfig, ServeConfig
from common.decoding import Completion, GenerationRequest
from common.errors import ConfigError
from common.generate import Generator
from common.requests import PromptMaker, RequestError, RequestMaker, Wishes
from common.requests.wishes import AnswerFields, CanvasFields, PaceFields
from common.serving.http.errors import ApiError
from common.serving.http.explain import explained
from common.serving.http.fields import CompletionFields
from common.serving.http.orders import OrderBook

BASES = [
    DecodeConfig(num_lookahead=3, block_size=16, max_new_tokens=64, temperature=0.7, top_p=0.9, stop=("END",)),
    DecodeConfig(strategy="block_diffusion", block_size=4, max_new_tokens=30, stop_token_ids=(7,), max_steps=9),
    DecodeConfig(strategy="vanilla", max_new_tokens=20, skip_special_tokens=False),
]
PACE = ("num_lookahead", "block_size", "block_add_threshold", "decoded_token_threshold", "skip_threshold")
numbers = st.one_of(
    st.floats(), st.integers(-3, 300), st.booleans(), st.sampled_from(["1", "auto", "", None, [1], {}, 10**30, 1e-40])
)
tokens = st.integers(-1, 220) | st.just(True) | st.just("7")
texts = st.sampled_from(["a", "END", "", "x" * 1001, "x" * 4097, "\ud800", 3, None])
WISHES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": numbers,
    "top_p": numbers,
    "top_k": numbers,
    "max_tokens": numbers,
    "seed": numbers,
    "stop": texts | st.lists(texts, max_size=4),
    "stop_token_ids": st.lists(tokens, max_size=4) | numbers,
    "ignore_eos": numbers,
    "skip_special_tokens": numbers,
    **dict.fromkeys(PACE, numbers),
}
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 1e-40, 0.0009, 0.2, 1, None]),
    "top_p": st.sampled_from([0.5, 1, None]),
    "top_k": st.sampled_from([-1, 0, 1, 50, None]),
    "max_tokens": st.integers(1, 90),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.sampled_from(["a", ["a", "b", "END", "a"], [], None]),
    "stop_token_ids": st.lists(st.integers(2, 150), max_size=3),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "num_lookahead": st.integers(0, 5),
    "block_size": st.integers(1, 16),
    "skip_threshold": st.sampled_from([0.5, 1, None]),
}
good = st.fixed_dictionaries({}, optional=GOOD)
one_odd = st.sampled_from([*WISHES]).flatmap(lambda name: st.fixed_dictionaries({name: WISHES[name]}))
wishes = st.builds(lambda most, odd: {"max_tokens": 16, **most, **odd}, good, one_odd | st.just({}))
prompts = st.sampled_from(["hi", "h" * 40, "", [104, 105], [1], [199, 200], [2**31 - 1]])
Made = tuple[tuple[int, ...], DecodeConfig, int | None, int | None, bool] | str


def maker_of(base: DecodeConfig) -> RequestMaker:
    return RequestMaker(base, PromptMaker(ScriptedTokenizer(), vocab_size=200), max_model_len=128)


def made(request: GenerationRequest, base: DecodeConfig) -> Made:
    return request.prompt, request.decode or base, request.seed, request.max_tokens, request.keeps_pace


def refused(sentence: str) -> str:
    """Without the place of the field, which is the door's."""
    return re.sub(r"^(line \d+: )?((decode|diffusion)\.)?", "", sentence)


def by_http(base: DecodeConfig, prompt: Any, asked: dict[str, Any]) -> Made:
    body = {name: value for name, value in asked.items() if name not in PACE}
    body["diffusion"] = {name: value for name, value in asked.items() if name in PACE}
    run = RunConfig(model="m", decode=base, serve=ServeConfig(max_num_lookahead=1000))
    maker = maker_of(base)
    try:
        fields = CompletionFields.model_validate({"prompt": prompt, **body})
        ids = maker.prompts.of_text(prompt) if isinstance(prompt, str) else maker.prompts.of_ids(prompt)
        book = OrderBook(run, maker, num_slots=4)
        book.check(fields)
        (order,) = book.orders("c-", fields, [ids], None).orders
    except ValidationError as error:
        return refused(str(explained(error.errors())))
    except (ApiError, ConfigError) as error:
        return refused(str(error))
    found = order.request
    seed = None if fields.seed is None else found.seed
    return found.prompt, order.decode, seed, found.max_tokens, found.keeps_pace


def by_batch(base: DecodeConfig, prompt: Any, asked: dict[str, Any]) -> Made:
    own = {name: value for name, value in asked.items() if name != "seed"}
    line = {"prompt": prompt, "decode": own, "seed": asked.get("seed")}
    assert _problem(line, None) is None
    source = InputConfig(path="-", settings_field="decode")
    found = LineRequests(source, maker_of(base)).request_or_reason(InputLine("a", 3, line))
    return refused(found) if isinstance(found, str) else made(found, base)


def by_python(base: DecodeConfig, prompt: Any, asked: dict[str, Any]) -> Made:
    """`Generator.complete`, whose engine only listens."""
    heard: list[GenerationRequest] = []

    def generate(requests: list[GenerationRequest]) -> list[Completion]:
        heard.extend(requests)
        return [Completion.of_nothing(request, "length") for request in requests]

    listening = SimpleNamespace(
        requests=maker_of(base), generate=generate, tokenizer=ScriptedTokenizer(), run=RunConfig(model="m", decode=base)
    )
    try:
        Generator.complete(cast("Any", listening), prompt, **asked)
    except ValueError as error:
        return refused(str(error).replace("prompt 0: ", "prompt: "))
    return made(heard[0], base)


@fuzzed
@given(base=st.sampled_from(BASES), prompt=prompts, asked=wishes)
def test_wishes_mean_the_same_through_every_door(base: DecodeConfig, prompt: Any, asked: dict[str, Any]) -> None:
    of_http = by_http(base, prompt, asked)
    assert by_batch(base, prompt, asked) == of_http
    assert by_python(base, prompt, asked) == of_http


def test_every_field_of_an_answer_and_its_pace_is_a_wish() -> None:
    values = {
        "stop": "x",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 1,
        "cache_salt": "a",
        "suffix": "a",
        "min_tokens": 3,
        "logit_bias": {"5": 1.5},
        "canvas": [{"mask": 1}],
        "choice_probabilities": True,
        "response_format": {"type": "json_object"},
        "structured_outputs": {"choice": ["a"]},
    }
    for name in (*AnswerFields.model_fields, *PaceFields.model_fields, *CanvasFields.model_fields):
        assert Wishes.read({name: values.get(name, 1)}) != Wishes(), name


def test_a_prompt_beyond_the_context_has_one_way_out() -> None:
    for length, fix in ((100, "shorten the prompt, or lower max_tokens"), (128, "shorten the prompt")):
        with pytest.raises(RequestError, match=f"{fix}$"):
            maker_of(DecodeConfig(block_size=16)).request("a", (104,) * length, Wishes.read({"max_tokens": 64}))
