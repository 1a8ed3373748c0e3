"""From a request's branches to its part of a step: the blocks that each opens and activates, and what is computed."""

from __future__ import annotations

import numpy as np

from common.decoding.scheduling.plain.layout import shift_entries
from common.decoding.scheduling.plain.state import PlainRequest, RequestStep


def plan_request(decoding: PlainRequest, first_row: int) -> RequestStep:
    """A request's rows, from first_row of the step on."""
    _open_and_activate(decoding)
    window = decoding.strategy.window(decoding.blocks, decoding.is_refreshed)
    ends = [window.end] * len(decoding.branches)
    opened = [decoding.blocks[-1].end] * len(decoding.branches)  # a window may reach behind it
    if any(branch.opens_block for branch in decoding.branches):
        own_end, new_end = window.end, decoding.strategy.new_block(decoding.blocks).end
        window = window.until(max(own_end, new_end))
        ends = [window.end if branch.opens_block else own_end for branch in decoding.branches]
        opened = [new_end if branch.opens_block else decoding.blocks[-1].end for branch in decoding.branches]
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
    return RequestStep(decoding, first_row, first_row + len(ends), window, ends, is_masked_BW, shift_column_of)


def _open_and_activate(decoding: PlainRequest) -> None:
    """Each branch by its own filled shares, its lookahead token included: the same for all in one block."""
    end_token_ids, found = decoding.rules.end_token_ids, {}
    for branch in decoding.branches:
        index = None if branch.position is None else decoding.block_index_at(branch.position)
        if index not in found:
            found[index] = _opened_and_activated(decoding, index)
        branch.opens_block, branch.activated = found[index]
        if branch.opens_block and (decoding.has_eos or branch.token in end_token_ids):
            branch.opens_block = False
            branch.activated = tuple([index for index in branch.activated if index < len(decoding.blocks)])


def _opened_and_activated(decoding: PlainRequest, filled_in: int | None) -> tuple[bool, tuple[int, ...]]:
    """Whether a branch without an end token opens a block, and which it activates. filled_in: the block that holds its
    lookahead token."""
    blocks, threshold = decoding.blocks, decoding.rules.decode.decoded_token_threshold

    def filled_share(index: int) -> float:
        block = blocks[index]
        return 1.0 - (block.num_masked - (index == filled_in)) / (block.end - block.start)

    last_share = filled_share(len(blocks) - 1)
    activated = [
        index
        for index in range(1, len(blocks))
        if not blocks[index].is_fully_activated and filled_share(index - 1) >= threshold
    ]
    opens_block = decoding.strategy.opens_block(blocks, last_share)
    if opens_block and last_share >= threshold:
        activated.append(len(blocks))
    return opens_block, tuple(activated)
