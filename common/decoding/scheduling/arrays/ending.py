"""Which requests of a batch have ended, and what can no longer change of those that go on.

Shapes: N requests, W positions of a block.
"""

from __future__ import annotations

import numpy as np

from common.decoding.plan import Int
from common.decoding.request import Completion, FinishReason
from common.decoding.scheduling.arrays.batch import RequestBatch
from common.decoding.scheduling.ending import Canvas, completion_of


def ended(batch: RequestBatch, now: float) -> list[tuple[int, Completion]]:
    """Requests that have ended with this step, by their place in the batch."""
    may_end_N = batch.first_open_N == batch.num_blocks_N
    may_end_N |= batch.num_forwards_N >= batch.max_steps_N
    may_end_N |= batch.may_end_N
    found = []
    for place in may_end_N.nonzero()[0].tolist():
        spent = _why_spent(batch, place)
        if spent is None and not batch.may_end_N[place]:
            continue
        completion = completion_of(batch.requests[place], canvas_of(batch, place), now, spent=spent)
        if completion is not None:
            found.append((place, completion))
    return found


def canvas_of(batch: RequestBatch, place: int) -> Canvas:
    decoding = batch.requests[place]
    own = slice(decoding.prompt_length, int(batch.origin_N[place] + batch.num_blocks_N[place] * batch.kind.block_size))
    return Canvas(
        decoding.token_S[own],
        decoding.is_masked_S[own],
        bool(batch.has_eos_N[place]),
        int(batch.num_forwards_N[place]),
        int(batch.num_wins_N[place]),
    )


def _why_spent(batch: RequestBatch, place: int) -> FinishReason | None:
    """There is no block active, so no mask left, and none to open, or it has had its steps."""
    num_blocks = batch.num_blocks_N[place]
    if batch.first_open_N[place] == num_blocks > batch.max_blocks_N[place]:
        return "length"
    return "max_steps" if batch.num_forwards_N[place] >= batch.max_steps_N[place] else None


def newly_final(batch: RequestBatch) -> list[tuple[int, tuple[int, ...]]]:
    """Tokens that can no longer change and were not given before, by place: no mask lies before them, and no end."""
    end_N = _final_end(batch)
    begin_N = batch.prompt_N + batch.num_given_N
    found = []
    for place in (end_N > begin_N).nonzero()[0].tolist():
        token_S, begin, eos = batch.requests[place].token_S, int(begin_N[place]), int(batch.eos_N[place])
        token_ids = tuple(token_S[begin : int(end_N[place])].tolist())
        if batch.has_eos_N[place]:
            if batch.num_given_N[place] and token_S[begin - 1] == eos:
                continue
            token_ids = token_ids[: token_ids.index(eos) + 1] if eos in token_ids else token_ids
        batch.num_given_N[place] += len(token_ids)
        found.append((place, token_ids))
    return found


def _final_end(batch: RequestBatch) -> Int:
    """The first masked position of each request, or the end of its blocks."""
    end_N = batch.origin_N + batch.first_open_N * batch.kind.block_size
    place_NW = (batch.offset_N + end_N)[:, None] + np.arange(batch.kind.block_size)
    filled_N = batch.tokens.is_masked_S.take(place_NW, mode="clip").argmax(axis=1)
    final_N: Int = end_N + np.where(batch.first_open_N < batch.num_blocks_N, filled_N, 0)
    return final_N
