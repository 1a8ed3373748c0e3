"""Events on the wire: one line each, whatever the text."""

from __future__ import annotations

import json

import pytest

from common.serving.http.responses.sse import event


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x1c", "\x85", "\u2028", "\u2029"])
def test_an_event_is_one_line_to_any_reader(end: str) -> None:
    line, empty = event({"text": f"é{end}😀"}).splitlines()
    assert not empty and json.loads(line.removeprefix("data: ")) == {"text": f"é{end}😀"}
