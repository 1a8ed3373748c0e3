"""The text of tokens that come one after another: whole characters only, and nothing that a stop string may begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.decoding import without_stop

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what pieces of a character are decoded to


class TextStream:
    """What was given out can no longer change; all of it together is the text of all tokens, without the stop string.

    decode: the text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._num_held = max((len(stop) - 1 for stop in stops), default=0)
        self._ids: list[int] = []
        self._context_at = 0  # tokens from here to _done_at are decoded once more, for how words are joined
        self._done_at = 0
        self._text = ""  # of the tokens in front of _done_at
        self._num_given = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """What these tokens make sure, often less than their text."""
        self._ids += token_ids
        before = self._decode(self._ids[self._context_at : self._done_at])
        after = self._decode(self._ids[self._context_at :])
        if after.endswith(_BROKEN) or not after.startswith(before):
            return ""
        self._text += after[len(before) :]
        self._context_at, self._done_at = self._done_at, len(self._ids)
        return self._give_up_to(len(self._text) - self._num_held)

    def end(self, token_ids: Sequence[int]) -> str:
        """The rest of the text, with these tokens, which are the last."""
        self._ids += token_ids
        whole = without_stop(self._decode(self._ids), self._stops)
        rest = whole[self._num_given :]
        self._num_given = len(whole)
        return rest

    def _give_up_to(self, end: int) -> str:
        begin, self._num_given = self._num_given, max(self._num_given, end)
        return self._text[begin : self._num_given]
