"""A step as the device computes it: this rank's rows flattened into tokens, grouped by what they may see.

StepPlan (rows, one after another) -> lay_out -> FlatStep (tokens, slots, virtual rows) -> [pad] -> buffers. Shift
entries whose prediction nobody reads are dropped here; captured steps are padded as a whole. Which predictions come
back every rank derives from the plan for all ranks, so that nobody has to send along what belongs where.

Shapes: T tokens, V virtual rows, P pages of the longest row, M reads of a rank, R rows of the rank, N their entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.decoding import Int, RowField, StepPlan
from lopa_ascend.kv import PAGE_SIZE, PageBook
from lopa_ascend.ops import group_queries


@dataclass(frozen=True, slots=True)
class FlatStep:
    """entries_3T: token id, position and slot of KV memory. read_M: tokens that go through the head. copies: pages
    (from, to) to copy before the step.

    num_dummies: slots of dummy pages in use, by shift entries and padding.
    """

    entries_3T: Int
    table_VP: Int
    query_ends: list[int]
    kv_lengths: list[int]
    read_M: Int
    copies: list[tuple[int, int]]
    num_dummies: int

    @property
    def num_tokens(self) -> int:
        return self.entries_3T.shape[1]


def lay_out(plan: StepPlan, rows: Int, book: PageBook) -> FlatStep:
    """Flatten `rows` of the plan; pages are taken from the book."""
    fields_8R = plan.row_fields_8R.take(rows, axis=1)
    num_entries_R, num_keys_R = fields_8R[RowField.NUM_ENTRIES], fields_8R[RowField.NUM_KEYS]
    entry_N, row_N = plan.entries_of(rows), np.arange(len(rows)).repeat(num_entries_R)
    entries_3N, is_read_N = plan.entries_3T.take(entry_N, axis=1), plan.is_read_T.take(entry_N)
    # A row that has not opened a block has no keys where others of its request already see some.
    horizon_N = np.minimum(entries_3N[2], (fields_8R[RowField.START] + num_keys_R).take(row_N))
    end_of_keys_R = num_entries_R.cumsum() - num_entries_R + num_keys_R
    is_key_N = np.arange(len(row_N)) < end_of_keys_R.take(row_N)
    used_T = (is_key_N | is_read_N).nonzero()[0]
    groups = group_queries(row_N.take(used_T), horizon_N.take(used_T))
    used_T = used_T.take(groups.order_T)
    pages = book.open_step(plan, rows)
    entries_3T = entries_3N.take(used_T, axis=1)
    position_T, num_pages = entries_3T[1], pages.table_RP.shape[1]
    page_T = pages.table_RP.take(row_N.take(used_T) * num_pages + position_T // PAGE_SIZE)
    slot_T = np.add(page_T * PAGE_SIZE, position_T % PAGE_SIZE, out=entries_3T[2])
    extra = (~is_key_N.take(used_T)).nonzero()[0]
    slot_T[extra] = book.dummy_slots(len(extra))
    token_of_N = np.empty(len(entry_N), dtype=np.int64)
    token_of_N[used_T] = np.arange(len(used_T))
    return FlatStep(
        entries_3T,
        table_VP=pages.table_RP.take(groups.row_V, axis=0),
        query_ends=groups.query_ends,
        kv_lengths=groups.kv_lengths,
        read_M=token_of_N[is_read_N],
        copies=pages.copies,
        num_dummies=len(extra),
    )


def pad(flat: FlatStep, num_tokens: int, num_rows: int, book: PageBook) -> FlatStep:
    """Add tokens and virtual rows: each padded row has one token and sees one key of the dummy page, the last row has
    all other tokens."""
    used_tokens, (used_rows, num_pages) = flat.num_tokens, flat.table_VP.shape
    more_tokens, more_rows = num_tokens - used_tokens, num_rows - used_rows
    assert more_tokens >= more_rows > 0, "every padded row has a token"
    num_dummies = flat.num_dummies + more_tokens
    entries_3T = np.zeros((3, num_tokens), dtype=np.int64)
    entries_3T[:, :used_tokens] = flat.entries_3T
    entries_3T[2, used_tokens:] = book.dummy_slots(num_dummies)[flat.num_dummies :]
    table_VP = np.zeros((num_rows, num_pages), dtype=np.int64)
    table_VP[:used_rows] = flat.table_VP
    return FlatStep(
        entries_3T,
        table_VP,
        query_ends=[*flat.query_ends, *range(used_tokens + 1, used_tokens + more_rows), num_tokens],
        kv_lengths=[*flat.kv_lengths, *[1] * more_rows],
        read_M=flat.read_M,
        copies=flat.copies,
        num_dummies=num_dummies,
    )


def filler(num_tokens: int, num_rows: int, num_pages: int, kv_length: int, book: PageBook) -> FlatStep:
    """Make a step of padding alone, at the largest lengths, on which a shape is captured so that its workspace
    suffices."""
    entries_3T = np.zeros((3, num_tokens), dtype=np.int64)
    entries_3T[2] = book.dummy_slots(num_tokens)
    return FlatStep(
        entries_3T,
        table_VP=np.zeros((num_rows, num_pages), dtype=np.int64),
        query_ends=[*range(1, num_rows), num_tokens],
        kv_lengths=[kv_length] * num_rows,
        read_M=np.zeros(0, dtype=np.int64),
        copies=[],
        num_dummies=num_tokens,
    )


def most_reads(plan: StepPlan, rows_of: Sequence[Int]) -> int:
    """Entries that the busiest rank puts through the head; at least one. rows_of: the plan's rows of each rank."""
    num_reads_R = np.add.reduceat(plan.is_read_T, plan.first_R, dtype=np.int64)
    return max(1, *[int(num_reads_R.take(rows).sum()) for rows in rows_of])


def read_entries(plan: StepPlan, rows_of: Sequence[Int]) -> list[Int]:
    """The plan's entries that each rank puts through the head, ascending as its rows are."""
    entry_M = plan.is_read_T.nonzero()[0]
    row_M = plan.first_R.searchsorted(entry_M, side="right") - 1
    entries_of = []
    for rows in rows_of:
        is_of_rank_R = np.zeros(plan.num_rows, dtype=np.bool_)
        is_of_rank_R[rows] = True
        entries_of.append(entry_M[is_of_rank_R.take(row_M)])
    return entries_of
