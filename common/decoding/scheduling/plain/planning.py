"""From a request's branches to its part of a step: the blocks that each opens, and what is computed."""

from __future__ import annotations

import numpy as np

from common.decoding.scheduling.plain.layout import shift_entries
from common.decoding.scheduling.plain.state import PlainRequest, RequestStep, spans_of


def plan_request(decoding: PlainRequest, first_row: int) -> RequestStep:
    """A request's rows, from first_row of the step on."""
    opens_block = _opens_block(decoding)
    window = decoding.strategy.window(decoding.blocks, decoding.is_refreshed)
    ends = [window.end] * len(decoding.branches)
    opened = [decoding.blocks[-1].end] * len(decoding.branches)  # a window may reach behind it
    if any(opens_block):
        own_end, new_end = window.end, decoding.strategy.new_block(decoding.blocks).end
        window = window.until(max(own_end, new_end))
        ends = [window.end if opens else own_end for opens in opens_block]
        opened = [new_end if opens else decoding.blocks[-1].end for opens in opens_block]
    start = window.start
    is_masked_BW = np.empty((len(ends), window.end - start), dtype=np.bool_)
    is_masked_BW[:] = decoding.is_masked_S[start : window.end]
    for index, branch in enumerate(decoding.branches):
        if branch.position is not None:
            is_masked_BW[index, branch.position - start] = False
    if min(opened) < window.end:
        for index, end in enumerate(opened):
            is_masked_BW[index, end - start :] = False
    starts = shift_entries(start, window.end, decoding)
    shift_column_of = {block_start: column for column, block_start in enumerate(starts)}
    spans = spans_of(tuple([end - start for end in ends]), len(starts))
    end_row = first_row + len(ends)
    return RequestStep(
        decoding, first_row, end_row, window, opens_block, ends, spans, is_masked_BW, shift_column_of
    )  # fmt: skip


def _opens_block(decoding: PlainRequest) -> list[bool]:
    """Whether each branch appends a block, by its own filled share of the last one, its lookahead token included."""
    blocks, opens_block = decoding.blocks, decoding.strategy.opens_block
    last, end_token_ids = blocks[-1], decoding.rules.end_token_ids
    with_token, without = opens_block(blocks, last.share_with(1)), opens_block(blocks, last.filled_share)
    if decoding.has_eos or not (with_token or without):
        return [False] * len(decoding.branches)
    return [
        (with_token if branch.position is not None and branch.position >= last.start else without)
        and branch.token not in end_token_ids
        for branch in decoding.branches
    ]
