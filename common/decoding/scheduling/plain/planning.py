"""From a request's branches to its part of a step: the blocks that each opens, and what is computed."""

from __future__ import annotations

import numpy as np

from common.decoding.scheduling.plain.layout import shift_columns
from common.decoding.scheduling.plain.state import PlainRequest, RequestStep, spans_of


def plan_request(decoding: PlainRequest, first_row: int) -> RequestStep:
    """A request's rows, from first_row of the step on."""
    blocks, branches, strategy = decoding.blocks, decoding.branches, decoding.strategy
    opens_block = _opens_block(decoding)
    window = strategy.window(blocks, decoding.is_refreshed)
    opened_end = new_end = blocks[-1].end  # a window may reach behind it
    start, num_branches = window.start, len(opens_block)
    widths = (window.end - start,) * num_branches
    if any(opens_block):
        own_end, new_end = window.end, strategy.new_block(blocks).end
        window = window.until(max(own_end, new_end))
        widths = tuple([(window.end if opens else own_end) - start for opens in opens_block])
    is_masked_BW = np.empty((num_branches, window.end - start), dtype=np.bool_)
    is_masked_BW[:] = decoding.is_masked_S[start : window.end]
    for row, position in enumerate(branches.positions):
        is_masked_BW[row, position - start] = False
    if opened_end < window.end:
        for row, opens in enumerate(opens_block):
            is_masked_BW[row, (new_end if opens else opened_end) - start :] = False
    column_of = shift_columns(start, window.end, decoding)
    spans = spans_of(widths, len(column_of))
    end_row = first_row + num_branches
    return RequestStep(decoding, first_row, end_row, window, opens_block, widths, spans, is_masked_BW, column_of)


def _opens_block(decoding: PlainRequest) -> list[bool]:
    """Whether each branch appends a block, by its own filled share of the last one, its lookahead token included."""
    blocks, branches, opens_block = decoding.blocks, decoding.branches, decoding.strategy.opens_block
    last = blocks[-1]
    if decoding.has_eos or not opens_block(blocks, last.share_with(1)):
        return [False] * len(branches)
    without, end_token_ids = opens_block(blocks, last.filled_share), decoding.rules.end_token_ids
    lookaheads = zip(branches.positions, branches.tokens, strict=True)
    opens = [(without or position >= last.start) and token not in end_token_ids for position, token in lookaheads]
    return [*opens, without]
