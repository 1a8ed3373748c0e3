"""What a message has of an answer's text, whatever pieces this comes in."""

from __future__ import annotations

import pytest

from common.text import MessageReader, Reading, Said, ToolCall

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1], "t": "</tool_call>"}}\n</tool_call>'
ADD = ToolCall("add", '{"a": [1], "t": "</tool_call>"}')
BROKEN = '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'


@pytest.mark.parametrize(
    ("reading", "text", "said"),
    [
        (Reading(), f"<think>a</think>{CALL}", Said(f"<think>a</think>{CALL}")),
        (Reading("maybe", True), f"\n<think>a < b</think>\n\nSo \n{CALL}\n{CALL}", Said("So", "a < b", (ADD, ADD))),
        (Reading("maybe", True), "<th", Said("<th")),
        (Reading("maybe"), " It <thinks>", Said(" It <thinks>")),
        (Reading("reasoning"), "a</thin", Said("", "a</thin")),
        (Reading("reasoning"), "a</think>\nb", Said("b", "a")),
        (Reading(has_calls=True), f"1 < 2 <tool {BROKEN} x", Said(f"1 < 2 <tool{BROKEN} x")),
        (Reading(has_calls=True), CALL.removesuffix("</tool_call>"), Said(calls=(ADD,))),
        (Reading(has_calls=True), "a \n", Said("a \n")),
        (Reading(has_calls=True, is_single=True), f"So {CALL}\n{CALL} and {CALL}", Said("Soand", calls=(ADD,))),
        (Reading("call"), '{"name": "add", "arguments": {}}', Said(calls=(ToolCall("add", "{}"),))),
        (Reading("call"), '{"name": "add", "argu', Said('{"name": "add", "argu')),
    ],
)
def test_every_way_to_cut_a_text_says_the_same(reading: Reading, text: str, said: Said) -> None:
    for first in range(len(text) + 1):
        for second in {first, min(first + 1, len(text)), min(first + 7, len(text)), len(text)}:
            reader = MessageReader(reading)
            parts = [reader.add(text[:first]), reader.add(text[first:second]), reader.add(text[second:], is_last=True)]
            together = Said(
                "".join(part.content for part in parts),
                "".join(part.reasoning for part in parts),
                tuple(call for part in parts for call in part.calls),
            )
            assert together == said and reader.num_calls == len(said.calls), (first, second)


def test_text_is_sent_as_soon_as_it_can_be_no_tag() -> None:
    reader = MessageReader(Reading(has_calls=True))
    assert [reader.add(piece).content for piece in ("a <tool", "s b", " ", "c")] == ["a", " <tools b", "", " c"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (r'{"x": "\ud800"}', r'{"x": "\ud800"}'),
        (r'{"x": "\ud83d\ude00"}', '{"x": "😀"}'),
        ('{"x": 1e999}', None),
        ('{"x": -1e999}', None),
    ],
)
def test_a_call_is_json_that_every_client_reads_or_none(arguments: str, shown: str | None) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    said = MessageReader(Reading(has_calls=True)).add(text, is_last=True)
    assert [call.arguments for call in said.calls] == ([] if shown is None else [shown])
    assert said.content == (text if shown is None else "")


def test_a_name_that_has_no_utf_8_is_no_call() -> None:
    text = r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'
    assert MessageReader(Reading(has_calls=True)).add(text, is_last=True).calls == ()
