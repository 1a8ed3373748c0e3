"""How long an answer will be, told by the first pass over a canvas of masks.

Survival length (arXiv 2608.26374): with h_j the probability of an end token at position j of the canvas, the answer is
expected to have the sum over i of the product over j < i of (1 - h_j) tokens, its end included.

Shapes: C positions of a canvas, E end tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.decoding.plan import Int, RowField, Score
from common.decoding.scheduling.logprobs import Tell
from common.decoding.scheduling.state import DecodingRequest
from common.decoding.scheduling.tables import Tables


def expected_length(logprob_CE: Score) -> float:
    """Return the expected number of tokens, from 1 to C. logprob_CE: of each end token at each position."""
    survived_C = np.cumprod(1 - np.minimum(np.exp(logprob_CE).sum(axis=1), 1))
    return 1 + float(survived_C[:-1].sum())


def cut_canvases(decodings: Sequence[DecodingRequest], tables: Tables, rows_8R: Int, tell: Tell) -> None:
    """Cut the canvases of requests whose first pass has just been received, before anything is filled: to the expected
    length and `survival_margin` tokens more, rounded up to whole blocks."""
    begins, entries, tokens = [0], [], []
    for decoding in decodings:
        state = tables.states[decoding.slot]
        first = int(rows_8R[RowField.FIRST, state["first_row"]]) + decoding.prompt_length - int(state["shift"])
        entry_C = np.arange(first, first + int(state["canvas_end"]) - decoding.prompt_length)
        ends = sorted(decoding.rules.end_token_ids)
        entries.append(np.repeat(entry_C, len(ends)))
        tokens.append(np.tile(ends, len(entry_C)))
        begins.append(begins[-1] + len(entries[-1]))
    logprob_F = tell(np.concatenate(entries), np.concatenate(tokens), 0).logprob_F.astype(np.float64)
    for decoding, begin, end in zip(decodings, begins, begins[1:], strict=False):
        expected = expected_length(logprob_F[begin:end].reshape(-1, len(decoding.rules.end_token_ids)))
        _cut(tables, decoding, expected)


def _cut(tables: Tables, decoding: DecodingRequest, expected: float) -> None:
    state, size, margin = tables.states[decoding.slot], decoding.rules.block_size, decoding.rules.survival_margin
    assert margin is not None, "the caller asks for those that have one"
    num_blocks = int(-(-(expected + margin) // size))
    end = min(int(state["canvas_end"]), decoding.prompt_length + num_blocks * size)
    first = int(state["first_block"])
    own_B = tables.block_B[first : first + int(state["num_blocks"])]
    state["num_blocks"], state["canvas_end"] = int((own_B["start"] < end).sum()), end
