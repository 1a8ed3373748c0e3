"""Split an answer's text into a message's reasoning, content and tool calls, piece by piece.

Reasoning stands up to </think>. Calls stand as Hermes and Qwen write them, <tool_call>, an object with name and
arguments, </tool_call>. What may still become a tag is held back, and so is a call until it is whole: only then is it
known that it is JSON.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

BEGIN_CALL, END_CALL = "<tool_call>", "</tool_call>"
BEGIN_REASONING, END_REASONING = "<think>", "</think>"
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which UTF-8 has no form of


class ToolCall(NamedTuple):
    """arguments: an object, as JSON."""

    name: str
    arguments: str


class Said(NamedTuple):
    """What a piece of text added to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class Reading(NamedTuple):
    """How an answer is read. begins: with its content; with reasoning, if there is a tag (`maybe`); within reasoning;
    within a call, of which the tags are not in the text. has_calls: content may hold calls, of which all but the first
    are left out where it is_single."""

    begins: Literal["content", "maybe", "reasoning", "call"] = "content"
    has_calls: bool = False
    is_single: bool = False


PLAIN = Reading()


@dataclass(slots=True)
class MessageReader:
    """Reads one answer. num_calls: those that were read."""

    reading: Reading
    num_calls: int = 0
    _place: str = ""
    _left: str = ""

    def __post_init__(self) -> None:
        self._place = self.reading.begins

    def add(self, text: str, *, is_last: bool = False) -> Said:
        """Take the next piece. is_last: nothing follows, so nothing is held back."""
        self._left += text
        said = Said()
        while True:
            before = self._place
            new = getattr(self, f"_{before}")(is_last)
            said = Said(said.content + new.content, said.reasoning + new.reasoning, said.calls + new.calls)
            if self._place == before:
                if self.reading.is_single:
                    said = said._replace(calls=said.calls[: max(0, 1 - self.num_calls)])
                self.num_calls += len(said.calls)
                return said

    def _maybe(self, is_last: bool) -> Said:
        text = self._left.lstrip()
        if text.startswith(BEGIN_REASONING):
            self._place, self._left = "reasoning", text[len(BEGIN_REASONING) :]
        elif is_last or not BEGIN_REASONING.startswith(text):
            self._place = "content"
        return Said()

    def _reasoning(self, is_last: bool) -> Said:
        text, tag, rest = self._left.partition(END_REASONING)
        if tag:
            self._place, self._left = "gap", rest
            return Said(reasoning=text)
        return Said(reasoning=self._taken(END_REASONING, is_last))

    def _gap(self, is_last: bool) -> Said:
        self._left = self._left.lstrip("\n")
        if self._left or is_last:
            self._place = "content"
        return Said()

    def _content(self, is_last: bool) -> Said:
        if not self.reading.has_calls:
            return Said(self._taken("", is_last))
        text, tag, rest = self._left.partition(BEGIN_CALL)
        if tag:
            self._place, self._left = "tagged", rest
            return Said(text.rstrip())
        return Said(self._taken(BEGIN_CALL, is_last, holds_space=True))

    def _tagged(self, is_last: bool) -> Said:
        end = self._left.find(END_CALL)
        while end >= 0:
            call = _call(self._left[:end])
            if call is not None:
                self._place, self._left = "called", self._left[end + len(END_CALL) :]
                return Said(calls=(call,))
            end = self._left.find(END_CALL, end + 1)  # the tag was within a text, or this is no call
        return self._call(is_last, BEGIN_CALL)

    def _called(self, is_last: bool) -> Said:
        self._left = self._left.lstrip()
        if self._left or is_last:
            self._place = "content"
        return Said()

    def _call(self, is_last: bool, tag: str = "") -> Said:
        if not is_last:
            return Said()
        text, self._left = self._left, ""
        call = _call(text)
        if call is None:
            return Said(tag + text if text else "")
        self._place = "called"
        return Said(calls=(call,))

    def _taken(self, tag: str, is_last: bool, *, holds_space: bool = False) -> str:
        """Return the text but for an end that may become the tag, and the white space in front of that."""
        whole = len(self._left)
        if not is_last:
            held = next((n for n in range(len(tag) - 1, 0, -1) if self._left.endswith(tag[:n])), 0)
            whole -= held
            whole = len(self._left[:whole].rstrip()) if holds_space else whole
        taken, self._left = self._left[:whole], self._left[whole:]
        return taken


def _call(text: str) -> ToolCall | None:
    """Return the call that a text is; None if it is none."""
    try:
        found = json.loads(text, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    name, arguments = found["name"], found.get("arguments", {})
    if not isinstance(arguments, dict) or _HALF.search(name):
        return None
    shown = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, shown.encode(errors="backslashreplace").decode())  # halves of letters as JSON escapes them


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(number: str) -> float:
    if math.isinf(found := float(number)):
        raise ValueError(f"{number} is too large")
    return found
