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

from common.decoding.plan import Bool, Int, RowField, part
from common.decoding.scheduling.arrays.batch import OF_ROWS, RequestBatch
from common.decoding.scheduling.arrays.strategies import STRATEGIES

_FIELDS = int(RowField.START) + len(OF_ROWS)
_START, _END, _OFFSET, _LAST_START, _SLACK, _EOS = (
    RowField.START + OF_ROWS.index(name)
    for name in ("start_N", "end_N", "offset_N", "last_start_N", "slack_N", "eos_N")
)


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


class Rows(NamedTuple):
    """A batch's part of a step; entries are counted within the part.

    first_row_N, request_R: rows of one request are adjacent. branch_R: the row's among all branches of the batch.
    fields_FR: StepPlan.row_fields_8R, and behind them the rest of `OF_ROWS`.
    position_R, token_R: the branch's own, or ANCHOR. opens_R: the branch appends a block. end_R: of its window.
    """

    batch: RequestBatch
    first_row_N: Int
    request_R: Int
    branch_R: Int
    fields_FR: Int
    position_R: Int
    token_R: Int
    opens_R: Bool
    end_R: Int
    shifts: Shifts | None

    @property
    def first_R(self) -> Int:
        return part(self.fields_FR, RowField.FIRST)

    @property
    def num_entries_R(self) -> Int:
        return part(self.fields_FR, RowField.NUM_ENTRIES)

    @property
    def num_keys_R(self) -> Int:
        return part(self.fields_FR, RowField.NUM_KEYS)

    @property
    def start_R(self) -> Int:
        return part(self.fields_FR, RowField.START)

    @property
    def offset_R(self) -> Int:
        """Of position 0 in the token table."""
        return part(self.fields_FR, _OFFSET)

    def entry_of(self, row_X: Int, position_X: Int) -> Int:
        """The place of a position of a row's window."""
        entry_X: Int = (self.first_R - self.start_R)[row_X] + position_X
        return entry_X


def spread(count_N: Int) -> Spread:
    begin_N = count_N.cumsum() - count_N
    owner_X = np.arange(len(count_N)).repeat(count_N)
    return Spread(begin_N, owner_X, np.arange(len(owner_X)) - begin_N.repeat(count_N))


def plan_rows(batch: RequestBatch) -> Rows:
    """All branches of all requests."""
    STRATEGIES[batch.kind.strategy].plan(batch)
    _measure_last_block(batch)
    first_row_N, request_R, branch_R = _remembered_spread(batch.num_branches_N.tobytes())
    branch_R = branch_R + request_R * batch.branch_2NB.shape[2]
    fields_FR = np.empty((_FIELDS, len(request_R)), dtype=np.int64)
    batch.of_rows_FN.take(request_R, axis=1, out=fields_FR[RowField.START :], mode="clip")
    position_R, token_R = batch.branch_2NB.reshape(2, -1).take(branch_R, axis=1)
    opens_R = fields_FR[_SLACK] + (position_R >= fields_FR[_LAST_START]) >= 0
    opens_R &= token_R != fields_FR[_EOS]
    end_R = opens_R * batch.kind.block_size
    end_R += fields_FR[_END]
    num_keys_R = np.subtract(end_R, fields_FR[_START], out=fields_FR[RowField.NUM_KEYS])
    fields_FR[RowField.NUM_ENTRIES] = num_keys_R
    np.subtract(num_keys_R.cumsum(), num_keys_R, out=fields_FR[RowField.FIRST])
    rows = Rows(batch, first_row_N, request_R, branch_R, fields_FR, position_R, token_R, opens_R, end_R, None)
    return rows if batch.kind.shift_row == "stale" else _with_shifts(rows)


def _measure_last_block(batch: RequestBatch) -> None:
    """Of the blocks before any branch opens one."""
    np.subtract(batch.end_N, batch.kind.block_size, out=batch.last_start_N)
    last_masked_N = batch.num_masked_NM[batch.place_N, batch.num_blocks_N - 1]
    np.subtract(batch.add_limit_N, last_masked_N, out=batch.slack_N)
    batch.slack_N[batch.num_blocks_N > batch.max_blocks_N] = -2


def _with_shifts(rows: Rows) -> Rows:
    """The same rows with shift entries.

    In full attention only the first position behind the cache needs one: every later predictor is in the window and
    sees all of it. Under block-causal attention no predictor sees the block behind it, so every block's first
    position does.
    """
    batch, size = rows.batch, rows.batch.kind.block_size
    is_masked_S = batch.tokens.is_masked_S
    if batch.kind.window_attention == "full":
        num_N = (batch.start_N > 0) & is_masked_S[batch.offset_N + batch.start_N]
        start_H, num_N = batch.start_N[num_N], num_N.astype(np.int64)
    else:
        widest_N = np.maximum.reduceat(rows.end_R, rows.first_row_N)
        first_N = np.maximum(batch.start_N, batch.prompt_N)
        _, request_H, index_H = spread((widest_N - first_N) // size)
        start_H = first_N[request_H] + index_H * size
        is_shifted_H = is_masked_S[batch.offset_N[request_H] + start_H]
        start_H = start_H[is_shifted_H]
        num_N = np.bincount(request_H[is_shifted_H], minlength=len(batch))
    num_R = num_N[rows.request_R]
    fields_FR = rows.fields_FR
    num_entries_R = np.add(rows.num_keys_R, num_R, out=fields_FR[RowField.NUM_ENTRIES])
    np.subtract(num_entries_R.cumsum(), num_entries_R, out=fields_FR[RowField.FIRST])
    _, row_X, column_X = spread(num_R)
    start_X = start_H[(num_N.cumsum() - num_N)[rows.request_R[row_X]] + column_X]
    return rows._replace(shifts=Shifts(row_X, start_X, (rows.first_R + rows.num_keys_R)[row_X] + column_X))


@lru_cache(maxsize=256)  # most requests have all of their branches in most steps
def _remembered_spread(counts: bytes) -> Spread:
    found = spread(np.frombuffer(counts, dtype=np.int64))
    for values_X in found:
        values_X.flags.writeable = False
    return found
