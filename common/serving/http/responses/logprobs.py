"""Log probabilities of an answer's tokens: each goes out with the text that holds it, in the form of its route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common.decoding import TokenLogprob
from common.text import BROKEN, AnswerText

TextOf = Callable[[Sequence[int]], list[str]]  # of each token by itself


class Told(NamedTuple):
    """offset: where the token's text begins in the answer."""

    token_id: int
    logprob: TokenLogprob
    offset: int


class ToldText:
    """An answer's text (`AnswerText`), and what is told of its tokens: held back as long as their text is."""

    def __init__(self, text: AnswerText) -> None:
        self._text = text
        self._num_given = 0
        self._is_amid_letter = False  # whether the last token has shown no text
        self._owed: list[Told] = []

    @property
    def stopped_by(self) -> str | int | None:
        return self._text.stopped_by

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[str, tuple[Told, ...]]:
        """Return the text that these tokens make sure, and what is told of tokens whose text has begun to go out.
        logprobs: empty where none are asked for."""
        if not logprobs:
            return self._text.add(token_ids), ()
        added = ""
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            num_held = len(self._text.held)
            new = self._text.add([token_id])
            own = (new + self._text.held)[num_held:]
            # What shows that bytes of tokens before it make no letter stands in front of its own text.
            num_broken = len(own) - len(own.lstrip(BROKEN)) if self._is_amid_letter else 0
            self._owed.append(Told(token_id, logprob, self._num_given + num_held + num_broken))
            self._is_amid_letter = not own
            added, self._num_given = added + new, self._num_given + len(new)
        waits = (place for place, told in enumerate(self._owed) if told.offset >= self._num_given)
        return added, self._paid(next(waits, None))

    def end(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[str, tuple[Told, ...]]:
        """Return the rest of the text, with these tokens, which are the last, and what is told of the rest."""
        added, told = self.add(token_ids, logprobs)
        rest = self._text.end()
        length = self._num_given + len(rest)  # tokens that the stop has cut off begin where the text ends
        left = tuple(one._replace(offset=min(one.offset, length)) for one in self._paid(None))
        return added + rest, told + left

    def _paid(self, count: int | None) -> tuple[Told, ...]:
        paid = tuple(self._owed[:count])
        del self._owed[:count]
        return paid


def of_chat(told: Sequence[Told], text_of: TextOf) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice."""
    return {"content": [_with_top(one, text_of) for one in told], "refusal": None}


def of_completion(told: Sequence[Told], text_of: TextOf) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice; if two tokens read alike, the more probable one is shown."""
    texts = text_of([one.token_id for one in told])
    tops = []
    for one, own in zip(told, texts, strict=True):
        top: dict[str, float] = {}
        alternatives = zip(text_of([token for token, _ in one.logprob.top]), one.logprob.top, strict=True)
        for text, (_, logprob) in alternatives:
            top.setdefault(text, logprob)
        tops.append({**top, own: max(one.logprob.logprob, top.get(own, one.logprob.logprob))})
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob.logprob for one in told],
        "top_logprobs": tops,
        "text_offset": [one.offset for one in told],
    }


def of_rollout(told: Sequence[Told], text_of: TextOf) -> dict[str, Any]:
    """Return SGLang's: triples of log probability, token id and text."""
    texts = text_of([one.token_id for one in told])
    pairs = list(zip(told, texts, strict=True))
    return {
        "output_token_logprobs": [[one.logprob.logprob, one.token_id, text] for one, text in pairs],
        "output_top_logprobs": [
            [[logprob, token, text_of([token])[0]] for token, logprob in one.logprob.top] for one in told
        ],
    }


def _with_top(one: Told, text_of: TextOf) -> dict[str, Any]:
    top = [_entry(token, logprob, text_of) for token, logprob in one.logprob.top]
    return {**_entry(one.token_id, one.logprob.logprob, text_of), "top_logprobs": top}


def _entry(token_id: int, logprob: float, text_of: TextOf) -> dict[str, Any]:
    """Return a token as OpenAI's log probabilities have it. bytes: null for a piece of a character, whose bytes its
    text does not show."""
    (text,) = text_of([token_id])
    return {"token": text, "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}
