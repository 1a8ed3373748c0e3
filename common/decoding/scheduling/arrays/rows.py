"""From a batch's branches to rows of a step: which blocks each opens, what it computes, which keys it has.

A row holds its window's positions first and its shift entries behind them. Position p is predicted by the entry of p
- 1: inside the window by its left neighbour, at the window's first position by the carry, and with `shift_row: fresh`
by a shift entry, a second query of position p - 1 that sees what p sees and provides no key.

Shapes: N requests, R rows, X shift entries of all rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from common.decoding.plan import Int, RowField, part
from common.decoding.scheduling.arrays.batch import ANCHOR, OF_ROWS, RequestBatch
from common.decoding.scheduling.arrays.strategies import STRATEGIES

# Where fields_FR holds them: StepPlan.row_fields_8R, the rest of OF_ROWS, and what differs between branches.
FIRST, NUM_ENTRIES, NUM_KEYS, START = (
    int(field) for field in (RowField.FIRST, RowField.NUM_ENTRIES, RowField.NUM_KEYS, RowField.START)
)
OFFSET, LAST_START, SLACK, EOS, NUM_MASKED, NEXT, REQUEST_END = (
    START + OF_ROWS.index(name)
    for name in ("offset_N", "last_start_N", "slack_N", "eos_N", "num_masked_N", "next_N", "end_N")
)
# A branch's own position and token; positions that it appends, a block or nothing; where its entries lie in the token
# table, and their positions, both less their place in the step; where its window ends.
POSITION, TOKEN, OPENED, PLACE, SHIFT, END, NUM_FIELDS = range(START + len(OF_ROWS), START + len(OF_ROWS) + 7)


class Spread(NamedTuple):
    """Things of several owners, one owner's behind another's: whose each is, and which of its owner's."""

    begin_N: Int
    owner_X: Int
    index_X: Int


class Shifts(NamedTuple):
    """Shift entries: the row, the first position of the block that the entry predicts, and its place in the step."""

    row_X: Int
    start_X: Int
    entry_X: Int


class Branches(NamedTuple):
    """All branches of all requests, as rows: where each request's begin, whose each is, which one it is among all that
    the batch has room for, and which of them are lookaheads.
    anchor_X: where fields_FR, flat, has position and token of the anchors."""

    first_row_N: Int
    request_R: Int
    branch_R: Int
    lookahead_L: Int
    is_lookahead_R: Int
    anchor_X: Int


class Rows(NamedTuple):
    """A batch's part of a step; entries are counted within the part.

    fields_FR: StepPlan.row_fields_8R, and behind them the rest of `OF_ROWS` and what differs between branches.
    """

    batch: RequestBatch
    branches: Branches
    fields_FR: Int
    shifts: Shifts | None

    @property
    def request_R(self) -> Int:
        """Rows of one request are adjacent."""
        return self.branches.request_R

    @property
    def first_R(self) -> Int:
        return part(self.fields_FR, FIRST)

    @property
    def num_entries_R(self) -> Int:
        return part(self.fields_FR, NUM_ENTRIES)

    @property
    def num_keys_R(self) -> Int:
        return part(self.fields_FR, NUM_KEYS)

    @property
    def start_R(self) -> Int:
        return part(self.fields_FR, START)

    @property
    def position_R(self) -> Int:
        """The branch's own, or ANCHOR."""
        return part(self.fields_FR, POSITION)

    @property
    def token_R(self) -> Int:
        return part(self.fields_FR, TOKEN)


def spread(count_N: Int) -> Spread:
    begin_N = np.add.accumulate(count_N) - count_N
    owner_X = np.arange(len(count_N)).repeat(count_N)
    return Spread(begin_N, owner_X, np.arange(len(owner_X)) - begin_N.repeat(count_N))


def plan_rows(batch: RequestBatch) -> Rows:
    """All branches of all requests."""
    STRATEGIES[batch.kind.strategy].plan(batch)
    _measure_last_block(batch)
    branches = _remembered_branches(batch.num_branches_N.tobytes(), batch.branch_2NB.shape[2])
    fields_FR = np.empty((NUM_FIELDS, len(branches.request_R)), dtype=np.int64)
    batch.of_rows_FN.take(branches.request_R, axis=1, out=fields_FR[START:POSITION], mode="clip")
    batch.branch_2NB.reshape(2, -1).take(branches.branch_R, axis=1, out=fields_FR[POSITION:OPENED], mode="clip")
    fields_FR.reshape(-1)[branches.anchor_X] = ANCHOR
    opens_R = fields_FR[SLACK] + (fields_FR[POSITION] >= fields_FR[LAST_START]) >= 0
    opens_R &= fields_FR[TOKEN] != fields_FR[EOS]
    opened_R, end_R, num_keys_R = fields_FR[OPENED], fields_FR[END], fields_FR[NUM_KEYS]
    np.multiply(opens_R, batch.size, out=opened_R)
    np.add(fields_FR[REQUEST_END], opened_R, out=end_R)
    np.subtract(end_R, fields_FR[START], out=num_keys_R)
    if batch.kind.shift_row == "stale":
        fields_FR[NUM_ENTRIES] = num_keys_R
        return Rows(batch, branches, _placed(fields_FR), None)
    return _with_shifts(batch, branches, fields_FR)


def _placed(fields_FR: Int) -> Int:
    """With where each row lies, which its number of entries tells."""
    first_R, num_entries_R, shift_R = fields_FR[FIRST], fields_FR[NUM_ENTRIES], fields_FR[SHIFT]
    np.add.accumulate(num_entries_R, out=first_R)
    first_R -= num_entries_R
    np.subtract(fields_FR[START], first_R, out=shift_R)
    np.add(shift_R, fields_FR[OFFSET], out=fields_FR[PLACE])
    return fields_FR


def _measure_last_block(batch: RequestBatch) -> None:
    """Of the blocks before any branch opens one."""
    np.subtract(batch.end_N, batch.size, out=batch.last_start_N)
    last_masked_N = batch.num_before_X[batch.before_N + batch.num_blocks_N]
    np.subtract(batch.add_limit_N, last_masked_N, out=batch.slack_N)
    batch.slack_N[batch.num_blocks_N > batch.max_blocks_N] = -2


def _with_shifts(batch: RequestBatch, branches: Branches, fields_FR: Int) -> Rows:
    """The rows with shift entries.

    In full attention only the first position behind the cache needs one: every later predictor is in the window and
    sees all of it. Under block-causal attention no predictor sees the block behind it, so every block's first
    position does.
    """
    size, request_R = batch.kind.block_size, branches.request_R
    is_masked_S = batch.tokens.is_masked_S
    if batch.kind.window_attention == "full":
        num_N = (batch.start_N > 0) & is_masked_S[batch.offset_N + batch.start_N]
        start_H, num_N = batch.start_N[num_N], num_N.astype(np.int64)
    else:
        widest_N = np.maximum.reduceat(fields_FR[END], branches.first_row_N)
        first_N = np.maximum(batch.start_N, batch.prompt_N)
        _, request_H, index_H = spread((widest_N - first_N) // size)
        start_H = first_N[request_H] + index_H * size
        is_shifted_H = is_masked_S[batch.offset_N[request_H] + start_H]
        start_H = start_H[is_shifted_H]
        num_N = np.bincount(request_H[is_shifted_H], minlength=len(batch))
    num_R = num_N[request_R]
    np.add(fields_FR[NUM_KEYS], num_R, out=fields_FR[NUM_ENTRIES])
    _placed(fields_FR)
    _, row_X, column_X = spread(num_R)
    start_X = start_H[(num_N.cumsum() - num_N)[request_R[row_X]] + column_X]
    shifts = Shifts(row_X, start_X, (fields_FR[FIRST] + fields_FR[NUM_KEYS])[row_X] + column_X)
    return Rows(batch, branches, fields_FR, shifts)


@lru_cache(maxsize=256)  # most requests have all of their branches in most steps
def _remembered_branches(counts: bytes, most: int) -> Branches:
    """counts: of each request, the anchor the last of them. most: for which each has room."""
    count_N = np.frombuffer(counts, dtype=np.int64)
    first_row_N, request_R, index_R = spread(count_N)
    anchor_N, is_lookahead_R = first_row_N + count_N - 1, np.ones_like(request_R)
    is_lookahead_R[anchor_N] = 0
    anchor_X = np.concatenate((anchor_N + POSITION * len(request_R), anchor_N + TOKEN * len(request_R)))
    index_R += request_R * most
    found = Branches(first_row_N, request_R, index_R, is_lookahead_R.nonzero()[0], is_lookahead_R, anchor_X)
    for values_X in found:
        values_X.flags.writeable = False
    return found
