"""Tools over HTTP by the openai client, with the demo model on a CPU and a chat template that shows tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.engine.serving.served import QUESTION, ROOT, WAIT_S, Served

pytestmark = pytest.mark.slow

pytest.importorskip("outlines_core", reason="needs the extra structured")

SCHEMA = {
    "type": "object", "required": ["count", "unit"], "additionalProperties": False,
    "properties": {"count": {"$ref": "#/$defs/count"}, "unit": {"enum": ["apples", "pears"]}},
    "$defs": {"count": {"type": "integer"}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "count_fruit", "description": "Counts.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED: Any = {"type": "function", "function": {"name": "count_fruit"}}
ASKED: dict[str, Any] = {
    "model": "shows_tools", "messages": [{"role": "user", "content": QUESTION.format(12)}], "max_tokens": 96,
}  # fmt: skip
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.count }}{% endfor %}"
    "{{ message['content'] + '\\n' }}{% endfor %}{% if thinks %}<think>{% else %}{# </think> #}{% endif %}"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("model") / "shows_tools"
    folder.mkdir()
    for file in (ROOT / "models/demo").iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    settings = json.loads((ROOT / "models/demo/tokenizer_config.json").read_text(encoding="utf-8"))
    written = json.dumps({**settings, "chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(written, encoding="utf-8")
    arguments = ("--set", f"model={folder}", "--set", "max_num_requests=4", "--set", "decode.num_lookahead=3")
    with Served(tmp_path_factory.mktemp("served") / "log", *arguments) as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_valid_whole_and_streamed(client: OpenAI, choice: Any) -> None:
    more: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "temperature": 0.8, "seed": 3}
    whole = client.chat.completions.create(**ASKED, **more, n=3)
    for answer in whole.choices:
        (call,) = answer.message.tool_calls or ()
        assert call.type == "function" and answer.finish_reason == "tool_calls" and answer.message.content is None
        assert call.function.name in ("count_fruit", "stop")[: 1 if choice is NAMED else 2]
        if call.function.name == "count_fruit":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    with client.chat.completions.stream(**ASKED, **more) as stream:
        (streamed,) = stream.get_final_completion().choices
    (call,), (first,) = streamed.message.tool_calls or (), whole.choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == (first.function.name, first.function.arguments)
    assert streamed.finish_reason == "tool_calls"


def test_tools_reach_the_template_and_none_is_called_by_a_text(client: OpenAI) -> None:
    plain, none, auto = (
        client.chat.completions.create(**ASKED, **more)
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
    )
    assert plain.choices[0].message.content == none.choices[0].message.content
    assert plain.usage and none.usage and auto.usage
    assert plain.usage.prompt_tokens == none.usage.prompt_tokens < auto.usage.prompt_tokens
    assert auto.choices[0].message.tool_calls is None and auto.choices[0].finish_reason != "tool_calls"
    called = {"id": "a", "type": "function", "function": {"name": "count_fruit", "arguments": '{"count": 7}'}}
    nested = {**called, "function": {**called["function"], "arguments": "[" * 100_000}}
    talk = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [called, nested]},
            {"role": "tool", "tool_call_id": "a", "content": "17"}]  # fmt: skip
    assert client.chat.completions.create(**{**ASKED, "messages": talk}, tools=TOOLS).choices


def test_reasoning_that_the_prompt_opens_is_split_off(client: OpenAI) -> None:
    kwargs = {"chat_template_kwargs": {"thinks": True}}
    message = client.chat.completions.create(**ASKED, extra_body=kwargs).choices[0].message.model_dump()
    assert message["reasoning"] == message["reasoning_content"] != "" and message["content"] == ""
    with client.chat.completions.stream(**ASKED, extra_body=kwargs) as stream:
        pieces = [event.chunk.choices[0].delta.model_dump() for event in stream if event.type == "chunk"]
    assert "".join(piece.get("reasoning") or "" for piece in pieces) == message["reasoning"]


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        ({"tools": [{}]}, "tools.0", 'write it as {"type": "function"'),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "the same name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "not among"),
        ({"tool_choice": "required"}, "tool_choice", "send tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": ["stop"]}, "tool_choice", "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"choice": ["a"]}}, "tool_choice", "held"),
        ({"tools": TOOLS, "tool_choice": "required", "max_tokens": 4}, "max_tokens", "raise it"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "the parameters of f: #/not",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_called_is_refused_in_a_sentence(client: OpenAI, body: Any, field: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(why)) as refused:
        client.chat.completions.create(**{**ASKED, "extra_body": body})
    assert refused.value.param == field
