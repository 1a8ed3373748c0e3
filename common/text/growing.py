"""The text of tokens that come one after another: what of it stays as it is, whatever tokens follow.

A decoder writes some tokens by what stands beside them. The bytes of a character may be several tokens, the first of a
text may lose its space, and a run of byte tokens is a text or broken as a whole. So new tokens are decoded together
with those before them, and what the next ones may still change waits.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what pieces of a character are decoded to
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_ONE_BY_ONE = {"BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


@dataclass(frozen=True, slots=True)
class Writing:
    """How a tokenizer's decoder writes tokens.

    special_tokens: their texts by id. known_ids: those that have a text. byte_ids: tokens of a byte each, of which a
    whole run is a text or broken. is_known: False where a text may change anywhere while tokens are added.
    """

    special_tokens: Mapping[int, str] = field(default_factory=dict)
    known_ids: Container[int] = range(2**31)
    byte_ids: frozenset[int] = frozenset()
    is_known: bool = True


class WritesText(Protocol):
    """A tokenizer."""

    @property
    def writing(self) -> Writing: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


def writing_of(decoder: Any, vocabulary: Mapping[str, int], special_tokens: Mapping[int, str]) -> Writing:
    """Read how a decoder writes from a tokenizer's parts. decoder: in the terms of tokenizer.json. vocabulary: added
    tokens too."""
    parts = list(_atoms(decoder))
    ids, count = set(vocabulary.values()), len(vocabulary)
    has_bytes = any(part.get("type") == "ByteFallback" for part in parts)
    return Writing(
        special_tokens=dict(special_tokens),
        known_ids=range(count) if ids == set(range(count)) else frozenset(ids),
        byte_ids=frozenset(id for token, id in vocabulary.items() if _BYTE.fullmatch(token))
        if has_bytes
        else frozenset(),
        is_known=_is_known(parts),
    )


class GrowingText:
    """What was given out can no longer change; all of it together with `rest` is the tokenizer's text of all tokens."""

    def __init__(self, tokenizer: WritesText, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._context: list[int] = []  # tokens that are decoded once more, for how others are joined to them
        self._pending: list[int] = []
        self._num_given = 0  # characters of the pending tokens

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens make sure."""
        writing = self._tokenizer.writing
        hidden: Container[int] = writing.special_tokens if self._skips else ()
        self._pending = [*self._pending, *(id for id in ids if id in writing.known_ids and id not in hidden)]
        ready = self._pending[: self._num_ready()]
        text = self._text_of(ready)
        sure = text.removesuffix(BROKEN)
        new = sure[self._num_given :]
        if sure != text:
            self._num_given = max(self._num_given, len(sure))
            return new
        self._pending, self._num_given = self._pending[len(ready) :], 0
        self._context = ready if text else self._context + ready
        return new

    def rest(self) -> str:
        """Return what else the text has if no token follows."""
        return self._text_of(self._pending)[self._num_given :]

    def _num_ready(self) -> int:
        """Return how many of the pending tokens the next ones leave as they are, but for a character in pieces."""
        writing, count = self._tokenizer.writing, len(self._pending)
        if not writing.is_known:
            return 0
        while count and self._pending[count - 1] in writing.byte_ids:
            count -= 1
        return count

    def _text_of(self, ids: list[int]) -> str:
        """Return the text of tokens that follow the context."""
        if not ids:
            return ""
        decode, context = self._tokenizer.decode, self._context
        return decode(context + ids, self._skips)[len(decode(context, self._skips)) if context else 0 :]


def _atoms(part: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(part, Mapping):
        if part.get("type") == "Sequence":
            for inner in part.get("decoders") or ():
                yield from _atoms(inner)
        else:
            yield part


def _is_known(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the text of more tokens begins with that of fewer, but for bytes of a character."""
    names = [str(part.get("type")) for part in parts]
    whole = parts[names.index("Fuse") + 1 :] if "Fuse" in names else ()  # what sees all of the text at once
    return (
        set(names) <= _ONE_BY_ONE
        and all(part["type"] == "Strip" and part["start"] <= 1 and not part["stop"] for part in whole)
        and "ByteLevel" not in names[:-1]
        and not {"ByteLevel", "ByteFallback"} <= set(names)
    )
