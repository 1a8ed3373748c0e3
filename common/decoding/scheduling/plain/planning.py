"""From a request's branches to its part of a step: the blocks that each opens and activates, and what is computed."""

from __future__ import annotations

import numpy as np

from common.decoding.scheduling.plain.layout import shift_entries
from common.decoding.scheduling.plain.state import PlainRequest, RequestStep


def plan_request(decoding: PlainRequest, first_row: int) -> RequestStep:
    """A request's rows, from first_row of the step on."""
    _open_and_activate(decoding)
    rules = decoding.rules
    window = decoding.strategy.window(decoding.blocks, decoding.is_refreshed)
    ends = [window.end] * len(decoding.branches)
    if any(branch.opens_block for branch in decoding.branches):
        own_end, window = window.end, window.until(decoding.strategy.new_block(decoding.blocks).end)
        ends = [window.end if branch.opens_block else own_end for branch in decoding.branches]
    start = window.start
    is_masked_BW = np.empty((len(ends), window.end - start), dtype=np.bool_)
    is_masked_BW[:] = decoding.is_masked_S[start : window.end]
    for index, (branch, end) in enumerate(zip(decoding.branches, ends, strict=True)):
        if branch.position is not None:
            is_masked_BW[index, branch.position - start] = False
        if end < window.end:
            is_masked_BW[index, end - start :] = False
    starts = shift_entries(start, window.end, decoding.prompt_length, decoding.is_masked_S, rules.decode)
    shift_column_of = {block_start: column for column, block_start in enumerate(starts)}
    return RequestStep(decoding, first_row, first_row + len(ends), window, ends, is_masked_BW, shift_column_of)


def _open_and_activate(decoding: PlainRequest) -> None:
    """Each branch by its own filled shares, its lookahead token included."""
    rules, blocks = decoding.rules, decoding.blocks
    threshold = rules.decode.decoded_token_threshold
    shares = [block.filled_share for block in blocks]
    waiting = [index for index in range(1, len(blocks)) if not blocks[index].is_fully_activated]
    for branch in decoding.branches:
        own, has_eos = shares, decoding.has_eos
        if branch.position is not None:
            index = decoding.block_index_at(branch.position)
            block, own = blocks[index], shares.copy()
            own[index] = 1.0 - (block.num_masked - 1) / (block.end - block.start)
            has_eos = has_eos or branch.token == rules.eos_token_id
        branch.opens_block = not has_eos and decoding.strategy.opens_block(blocks, own[-1])
        branch.activated = tuple([index for index in waiting if own[index - 1] >= threshold])
        if branch.opens_block and own[-1] >= threshold:
            branch.activated += (len(blocks),)
