"""Where a stop string ends a text, looked for in token ids while they are being decoded.

Looking is a part of every step, so only the text of new tokens is made, with a little in front of it. Where that may
hold a stop string, the whole text decides (`StopFinder.in_whole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_SLACK = 16  # characters by which the text of some tokens may differ from the same part of the whole, at the cut
_MOST_PIECES = 4  # tokens that one character may be made of
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what pieces of a character are decoded to


class DecodesText(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class StopFinder:
    """common.decoding.FindStop."""

    stops: tuple[str, ...]
    tokenizer: DecodesText

    def __call__(self, ids: Sequence[int], num_searched: int) -> int | None:
        if len(ids) == num_searched:
            return None
        tail = self._tail(ids, num_searched)
        return self.in_whole(ids) if tail is None or self._is_in(tail) else None

    def in_whole(self, ids: Sequence[int]) -> int | None:
        """The fewest ids whose text holds a stop string, if that of all of them does."""
        if not self._is_in(self.tokenizer.decode(ids)):
            return None
        return next(n for n in range(1, len(ids) + 1) if self._is_in(self.tokenizer.decode(ids[:n])))

    def _is_in(self, text: str) -> bool:
        return any(stop in text for stop in self.stops)

    def _tail(self, ids: Sequence[int], num_searched: int) -> str | None:
        """The end of the text, with all that the new ids can have completed; None where only the whole text can tell:
        near the beginning, and where characters are in pieces."""
        if any(_BROKEN in stop for stop in self.stops):
            return None
        reach = max(map(len, self.stops)) + _SLACK
        num_back = reach
        while num_back + _MOST_PIECES <= num_searched:
            start = num_searched - num_back
            # One of these cuts goes between two characters. The last character may still be in pieces.
            tails = ((cut, self.tokenizer.decode(ids[cut:])) for cut in range(start, start - _MOST_PIECES, -1))
            cut, tail = next(((cut, tail) for cut, tail in tails if _BROKEN not in tail[:-_MOST_PIECES]), (None, None))
            if cut is None:
                return None
            # What the search before this one saw in pieces at its end is new to this one.
            if len(self.tokenizer.decode(ids[cut:num_searched]).rstrip(_BROKEN)) >= reach:
                return tail
            num_back *= 2  # tokens without text, or several a character
        return None


def stop_finder(stops: Sequence[str], tokenizer: DecodesText) -> StopFinder | None:
    """How many generated ids to keep so that the text ends with the first stop string; None without stop strings."""
    return StopFinder(tuple(stops), tokenizer) if stops else None
