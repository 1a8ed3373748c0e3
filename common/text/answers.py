"""Make an answer's text of its tokens, without what ends it: the one place where stop strings are looked for.

The engine asks it when to stop decoding, every door what to show. So it decides by the text that a client gets: the
answer ends before the stop string that begins first, the shorter one if two begin together. While one that began
earlier may still be completed, nothing is decided.

A special token can be a stop string, or a part of one, also where special tokens are not shown. In the text that is
searched for a part of one it is written as a letter that no text has.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from common.text.growing import GrowingText, WritesText

_MARK = 0xD800  # half a surrogate pair is no text: from here on they stand for special tokens that are not shown
_MARKS = re.compile("[\ud800-\udfff]")
_MOST_MARKS = 0x800


class SaysStops(Protocol):
    """The settings of `decode` that say where an answer ends."""

    @property
    def stop(self) -> tuple[str, ...]: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def skip_special_tokens(self) -> bool: ...


class _Needle(NamedTuple):
    """A stop string, and what is looked for in its place."""

    text: str
    stop: str


class _Match(NamedTuple):
    begin: int
    length: int
    stop: str


class AnswerText:
    """The text of tokens that come one after another, up to the stop: what was given out never changes.

    stopped_by: the stop string or the stop token's id; None: nothing has stopped it. includes_stop: the text ends with
    the stop.
    """

    def __init__(self, tokenizer: WritesText, decode: SaysStops, *, includes_stop: bool = False) -> None:
        self.stopped_by: str | int | None = None
        self._text = GrowingText(tokenizer, decode.skip_special_tokens)
        self._includes_stop = includes_stop
        self._needles = [_Needle(stop, stop) for stop in decode.stop]
        self._stop_of: dict[int, str | int] = {}  # tokens that end the answer as soon as they come
        self._mark_of: dict[int, str] = {}  # special tokens that are not shown and are a part of a stop string
        if decode.skip_special_tokens and decode.stop:
            special = tokenizer.writing.special_tokens.items()
            self._stop_of = {id: text for id, text in special if text in decode.stop}
            self._mark_of = _marks(tokenizer, decode.stop)
        self._stop_of |= {id: id for id in decode.stop_token_ids}
        self._spelled = _spelled(tokenizer, decode.stop, self._mark_of)
        self._held = ""  # sure, and may begin a stop string; with marks

    @property
    def held(self) -> str:
        """Text that is sure and waits, since a stop string may begin with it."""
        return _shown(self._held)

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens make sure, often less than theirs. After the stop nothing counts."""
        if self.stopped_by is not None:
            return ""
        index = next((index for index, id in enumerate(ids) if id in self._stop_of), None)
        if index is None:
            self._take(ids)
            return self._give(is_over=False)
        self._take(ids[: index + self._includes_stop])
        text = self._finish()
        if self.stopped_by is None:
            self.stopped_by = stop = self._stop_of[ids[index]]
            return text + stop if self._includes_stop and isinstance(stop, str) else text
        return text

    def end(self, ids: Sequence[int] = ()) -> str:
        """Return the rest of the text, with these tokens, which are the last."""
        text = self.add(ids)
        return text + self._finish() if self.stopped_by is None else text

    def copy(self) -> AnswerText:
        made = copy.copy(self)
        made._text = copy.copy(self._text)
        return made

    def _take(self, ids: Sequence[int]) -> None:
        begin = 0
        if self._mark_of:
            for index, id in enumerate(ids):
                if id in self._mark_of:
                    self._held += self._text.add(ids[begin:index]) + self._mark_of[id]
                    begin = index + 1
        self._held += self._text.add(ids[begin:])

    def _finish(self) -> str:
        self._held += self._text.rest()
        return self._give(is_over=True)

    def _give(self, *, is_over: bool) -> str:
        """Return what no stop string can begin in any more, up to the first of them."""
        shown = _shown(self._held) if self._mark_of else self._held
        match, wait = _first(shown, self._needles, is_over)
        if self._spelled:
            spelled, spelled_wait = _first(self._held, self._spelled, is_over)
            wait = min(wait, len(_shown(self._held[:spelled_wait])))
            if spelled is not None:
                spelled = spelled._replace(begin=len(_shown(self._held[: spelled.begin])))
                match = spelled if match is None else min(match, spelled)
        if match is not None and match.begin <= wait:
            self.stopped_by, self._held = match.stop, ""
            return shown[: match.begin] + (match.stop if self._includes_stop else "")
        self._held = self._held[_place_of(wait, self._held) :] if self._mark_of else self._held[wait:]
        return shown[:wait]


class StopSearch:
    """common.decoding.StopSearch: how many ids of an answer are needed to see its stop string."""

    def __init__(self, answer: AnswerText) -> None:
        self.num_seen = 0
        self._answer = answer

    def find(self, more_ids: Sequence[int], is_over: bool) -> int | None:
        before = self._answer.copy()
        self._answer.add(more_ids)
        if self._answer.stopped_by is not None:
            while before.stopped_by is None:
                before.add(more_ids[:1])
                more_ids, self.num_seen = more_ids[1:], self.num_seen + 1
            return self.num_seen
        self.num_seen += len(more_ids)
        if is_over:
            whole = self._answer.copy()
            whole.end()
            return self.num_seen if whole.stopped_by is not None else None
        return None


def stop_finder(decode: SaysStops, tokenizer: WritesText) -> Callable[[], StopSearch] | None:
    """common.decoding.StopFinder; stop tokens are the scheduler's, which knows them by their ids."""
    if not decode.stop:
        return None
    answer = AnswerText(tokenizer, decode)
    return lambda: StopSearch(answer.copy())


def answer_text(tokenizer: WritesText, ids: Sequence[int], decode: SaysStops) -> str:
    """Return the text of a whole answer, up to its stop."""
    return AnswerText(tokenizer, decode).end(ids)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the plain text in front of the first of the stop strings."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def answer_of(text: str) -> str:
    """Return what follows a model's thoughts, `<think> ... </think>`; drafts in them are no answers."""
    return text.rpartition("</think>")[2]


def _first(text: str, needles: Sequence[_Needle], is_over: bool) -> tuple[_Match | None, int]:
    """Return the match that begins first, and the place from which the text may go on to be another."""
    found = (_Match(text.find(needle.text), len(needle.text), needle.stop) for needle in needles)
    match = min((one for one in found if one.begin >= 0), default=None)
    may_begin = () if is_over else map(partial(_may_begin, text), needles)
    return match, min(may_begin, default=len(text))


def _may_begin(text: str, needle: _Needle) -> int:
    """Return where the text ends with a part of the needle, which it may complete."""
    first, begin = needle.text[0], max(0, len(text) - len(needle.text) + 1)
    while (begin := text.find(first, begin)) >= 0:
        if needle.text.startswith(text[begin:]):
            return begin
        begin += 1
    return len(text)


def _marks(tokenizer: WritesText, stops: Sequence[str]) -> dict[int, str]:
    special = tokenizer.writing.special_tokens.items()
    inside = [id for id, text in special if text and any(text in stop and text != stop for stop in stops)]
    return {id: chr(_MARK + index) for index, id in enumerate(inside[:_MOST_MARKS])}


def _spelled(tokenizer: WritesText, stops: Sequence[str], mark_of: dict[int, str]) -> list[_Needle]:
    """Return stop strings with marks in the place of special tokens' texts, of which the longer ones go first."""
    mark_of_text = {tokenizer.writing.special_tokens[id]: mark for id, mark in mark_of.items()}
    if not mark_of_text:
        return []
    texts = re.compile("|".join(map(re.escape, sorted(mark_of_text, key=len, reverse=True))))
    made = (_Needle(texts.sub(lambda found: mark_of_text[found[0]], stop), stop) for stop in stops)
    return [needle for needle in made if needle.text != needle.stop]


def _shown(text: str) -> str:
    return _MARKS.sub("", text)


def _place_of(num_shown: int, text: str) -> int:
    """Return the first place that has so many letters other than marks before it."""
    index = 0
    while num_shown:
        num_shown -= not _MARKS.match(text[index])
        index += 1
    return index
