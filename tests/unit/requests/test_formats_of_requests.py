"""The door of formats and tools: what a request is made of, and what is refused, with the field to blame."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from common.config import DecodeConfig
from common.requests import PromptMaker, RequestError, RequestMaker, Wishes
from common.requests.tools import forced_call, why_no_tools


class Bytes:
    """A tokenizer of bytes."""

    mask_id = None
    has_chat_template = False

    def token_bytes(self) -> dict[int, bytes]:
        return {byte: bytes([byte]) for byte in range(256)}


CHOICE = {"structured_outputs": {"choice": ["yes", "not sure"]}}


def made(asked: dict[str, Any], **base: Any) -> Any:
    decode = DecodeConfig.model_validate({"max_new_tokens": 32, "block_size": 32, **base})
    prompts: Any = PromptMaker(Bytes(), vocab_size=300)  # type: ignore[arg-type]
    return RequestMaker(decode, prompts, max_model_len=128).request("a", (1, 2), Wishes.read(asked))


def test_a_choice_becomes_an_automaton_and_the_runs_stops_are_left_aside() -> None:
    request = made(CHOICE, stop=("x",), temperature=0.8, top_p=0.9)
    assert request.automaton.shortest == 3 and request.decode.stop == () and request.decode.top_p == 1.0
    assert made({"response_format": {"type": "text"}, "structured_outputs": {}}).automaton is None
    assert made({}, stop=("x",)).decode is None


@pytest.mark.parametrize(
    ("asked", "field", "why"),
    [
        ({**CHOICE, "max_tokens": 2}, "max_tokens", "has 3 tokens, more than 2"),
        ({**CHOICE, "stop": "x"}, "stop", "ends where that does"),
        ({**CHOICE, "ignore_eos": True}, "ignore_eos", "end token"),
        ({**CHOICE, "temperature": 1.0, "top_p": 0.5}, "top_p", "remove it"),
        ({**CHOICE, "temperature": 1.0, "top_k": 1}, "top_k", "remove it"),
        ({"min_tokens": 2, "temperature": 1.0, "top_k": 1}, "top_k", "remove it"),
        ({"logit_bias": {"5": 1}, "temperature": 1.0, "top_k": 1}, "top_k", "remove it"),
        ({**CHOICE, "sampling_strategy": "margin"}, None, "neg_entropy"),
        ({**CHOICE, "response_format": {"type": "json_object"}}, "structured_outputs", "one of the two"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs", "grammar is not enforced"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "cannot both"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", ""),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "list of texts"),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format",
            "schema has no place beside type",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {}}},
            "response_format",
            "json_schema has no place beside",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], field: str | None, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        made(asked)
    assert refused.value.field == field and why in refused.value.reason


@pytest.mark.parametrize("neutral", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}], ids=str)
def test_what_leaves_all_tokens_to_draw_from_goes_with_a_format(neutral: dict[str, Any]) -> None:
    assert made({**CHOICE, "temperature": 1.0, **neutral}).automaton is not None


def test_without_the_library_one_sentence_says_what_to_install() -> None:
    if importlib.util.find_spec("outlines_core") is not None:
        pytest.skip("the library is here")
    with pytest.raises(RequestError, match=r"pip install 'lopa\[structured\]'"):
        made({"structured_outputs": {"regex": "a"}})


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_tool_without_parameters_takes_any_object(parameters: dict[str, object]) -> None:
    tools = [{"type": "function", "function": {"name": "stop", **parameters}}]
    assert why_no_tools(tools) is None
    plain = [{"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}]
    assert forced_call("required", tools) == forced_call("required", plain)
