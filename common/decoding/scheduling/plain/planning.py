"""From a request's branches to its part of a step: the blocks that each opens, and what is computed."""

from __future__ import annotations

import numpy as np

from common.decoding.scheduling.plain.layout import shift_entries
from common.decoding.scheduling.plain.state import PlainRequest, RequestStep, spans_of


def plan_request(decoding: PlainRequest, first_row: int) -> RequestStep:
    """A request's rows, from first_row of the step on."""
    _open_blocks(decoding)
    window = decoding.strategy.window(decoding.blocks, decoding.is_refreshed)
    ends = [window.end] * len(decoding.branches)
    opened = [decoding.blocks[-1].end] * len(decoding.branches)  # a window may reach behind it
    opens_block = [branch.opens_block for branch in decoding.branches]
    if any(opens_block):
        own_end, new_end = window.end, decoding.strategy.new_block(decoding.blocks).end
        window = window.until(max(own_end, new_end))
        ends = [window.end if opens else own_end for opens in opens_block]
        opened = [new_end if opens else decoding.blocks[-1].end for opens in opens_block]
    start = window.start
    is_masked_BW = np.empty((len(ends), window.end - start), dtype=np.bool_)
    is_masked_BW[:] = decoding.is_masked_S[start : window.end]
    for index, (branch, end) in enumerate(zip(decoding.branches, opened, strict=True)):
        if branch.position is not None:
            is_masked_BW[index, branch.position - start] = False
        if end < window.end:
            is_masked_BW[index, end - start :] = False
    starts = shift_entries(start, window.end, decoding)
    shift_column_of = {block_start: column for column, block_start in enumerate(starts)}
    spans = spans_of(tuple([end - start for end in ends]), len(starts))
    return RequestStep(decoding, first_row, first_row + len(ends), window, ends, spans, is_masked_BW, shift_column_of)


def _open_blocks(decoding: PlainRequest) -> None:
    """Each branch by its own filled share of the last block, its lookahead token included."""
    blocks, opens_block = decoding.blocks, decoding.strategy.opens_block
    last, end_token_ids = blocks[-1], decoding.rules.end_token_ids
    opens_without = opens_block(blocks, last.filled_share)
    opens_with = opens_block(blocks, last.share_with(1))
    for branch in decoding.branches:
        is_in_last = branch.position is not None and branch.position >= last.start
        opens = opens_with if is_in_last else opens_without
        branch.opens_block = opens and not decoding.has_eos and branch.token not in end_token_ids
