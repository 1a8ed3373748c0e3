"""The log probabilities of a request's tokens, by where each comes from: a token that moves keeps its own.

After a step the engine is asked for those predictions of its pass that became tokens or may become some: fills, edits,
the lookaheads of the next pass, and what is carried into it (`tables.ORIGIN`). Requests that do not ask have no book.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from common.decoding.plan import Int, Logprobs
from common.decoding.request import TokenLogprob
from common.decoding.scheduling.tables import Tables

Tell = Callable[[Int, Int, int], Logprobs]  # entries of the last pass, a token for each, alternatives of each
_Prediction = tuple[int, int, int]  # pass, entry, token


class Book(NamedTuple):
    """num_top: alternatives beside each token. told: of predictions that became tokens or may become some."""

    slot: int
    num_top: int
    told: dict[_Prediction, TokenLogprob]

    def of(self, tables: Tables, begin: int, end: int) -> tuple[TokenLogprob, ...]:
        """Return those of the tokens at positions [begin, end), all of them filled."""
        first = int(tables.states[self.slot]["first_position"])
        own = slice(first + begin, first + end)
        origins = tables.origin_P[own].tolist()
        return tuple(
            self.told[(step, entry, token)]
            for (step, entry), token in zip(origins, tables.token_P[own].tolist(), strict=True)
        )

    def asked(self, tables: Tables) -> list[_Prediction]:
        """Return the predictions of the pass that has just ended that are to be told of."""
        state = tables.states[self.slot]
        first, now = int(state["first_position"]), int(state["num_forwards"])
        own = slice(first + int(state["prompt_length"]), first + int(state["num_positions"]))
        index = (tables.origin_P[own]["step"] == now).nonzero()[0]
        entries, tokens = tables.origin_P[own]["entry"][index].tolist(), tables.token_P[own][index].tolist()
        found = {(now, entry, token) for entry, token in zip(entries, tokens, strict=True)}
        for branch in range(int(state["num_lookaheads"])):
            count = int(tables.branches_K[self.slot, branch]["num_fills"])
            for _, token, step, entry in tables.fills_KF[self.slot, branch, :count].tolist():
                found.add((step, entry, token))
        found.add((int(state["carry_step"]), int(state["carry_entry"]), int(state["carry_token"])))
        return sorted(prediction for prediction in found if prediction[0] == now)


def note(books: list[Book], tables: Tables, tell: Tell) -> None:
    """Ask for what the pass that has just ended brought to these requests, all in one, and write it down."""
    asked = [(book, prediction) for book in books for prediction in book.asked(tables)]
    if not asked:
        return
    _, entries, tokens = zip(*(prediction for _, prediction in asked), strict=True)
    num_top = max(book.num_top for book in books)
    told = tell(np.array(entries, np.int64), np.array(tokens, np.int64), num_top)
    for (book, prediction), one in zip(asked, _rows(told), strict=True):
        book.told[prediction] = one.cut(book.num_top)


def _rows(told: Logprobs) -> Iterator[TokenLogprob]:
    tops = zip(told.top_token_FC.tolist(), told.top_logprob_FC.tolist(), strict=True)
    for logprob, (tokens, logprobs) in zip(told.logprob_F.tolist(), tops, strict=True):
        yield TokenLogprob(logprob, tuple(zip(tokens, logprobs, strict=True)))
