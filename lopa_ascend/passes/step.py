"""A step as the device computes it: this rank's rows flattened into tokens, grouped by what they may see.

StepPlan (rows, one behind another) -> lay_out -> FlatStep (tokens, slots, virtual rows) -> [pad] -> buffers. Shift
entries whose prediction nobody reads are dropped here; captured steps are padded as a whole. Predictions come back by
`Reads`, which every rank derives from the plan for all ranks, so that nobody has to send along what belongs where.

Shapes: T tokens, V virtual rows, P pages of the longest row, M reads of a rank, R rows, N entries of the rank's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from common.decoding import Int, Predictions, StepPlan, assign_rows
from common.model import Int32, sampling_fields
from lopa_ascend.kv import PAGE_SIZE, PageBook
from lopa_ascend.ops import group_queries


@dataclass(frozen=True, slots=True)
class FlatStep:
    """read_M: tokens that go through the head. copies: pages (from, to) to copy before the step.

    num_dummies: slots of dummy pages in use, by shift entries and padding.
    """

    token_T: Int
    position_T: Int
    slot_T: Int
    table_VP: Int
    query_ends: list[int]
    kv_lengths: list[int]
    read_M: Int
    copies: list[tuple[int, int]]
    num_dummies: int


def rows_by_rank(plan: StepPlan, num_ranks: int) -> list[Int]:
    """The plan's rows that each branch-parallel rank computes, ascending; none twice, so none has to be padded away."""
    return [np.unique(hand) for hand in assign_rows(plan, num_ranks)]


def lay_out(plan: StepPlan, rows: Int, book: PageBook) -> FlatStep:
    """Flatten `rows` of the plan; pages are taken from the book."""
    entry_N, row_N = plan.entries_of(rows), np.arange(len(rows)).repeat(plan.num_entries_R[rows])
    is_key_N = entry_N < (plan.first_R + plan.num_keys_R)[rows].repeat(plan.num_entries_R[rows])
    is_read_N = plan.is_read_T[entry_N]
    used_T = np.flatnonzero(is_key_N | is_read_N)
    end_R = (plan.start_R + plan.num_keys_R)[rows]
    # A row that has not opened a block has no keys where others of its request already see some.
    horizon_T = np.minimum(plan.horizon_T[entry_N[used_T]], end_R[row_N[used_T]])
    groups = group_queries(row_N[used_T], horizon_T)
    used_T = used_T[groups.order_T]
    pages = book.open_step(plan, rows)
    position_T = plan.position_T[entry_N[used_T]]
    slot_T = pages.table_RP[row_N[used_T], position_T // PAGE_SIZE] * PAGE_SIZE + position_T % PAGE_SIZE
    is_extra_T = ~is_key_N[used_T]
    num_dummies = int(is_extra_T.sum())
    slot_T[is_extra_T] = book.dummy_slots(num_dummies)
    token_of_N = np.empty(len(entry_N), dtype=np.int64)
    token_of_N[used_T] = np.arange(len(used_T))
    return FlatStep(
        token_T=plan.token_T[entry_N[used_T]],
        position_T=position_T,
        slot_T=slot_T,
        table_VP=pages.table_RP[groups.row_V],
        query_ends=groups.query_ends,
        kv_lengths=groups.kv_lengths,
        read_M=token_of_N[is_read_N],
        copies=pages.copies,
        num_dummies=num_dummies,
    )


def pad(flat: FlatStep, num_tokens: int, num_rows: int, book: PageBook) -> FlatStep:
    """More tokens and virtual rows: each padded row has one token and sees one key of the dummy page, the last row has
    all other tokens."""
    more_tokens, more_rows = num_tokens - len(flat.token_T), num_rows - len(flat.query_ends)
    assert more_tokens >= more_rows > 0, "every padded row has a token"
    num_dummies = flat.num_dummies + more_tokens
    first = len(flat.token_T) + 1
    return replace(
        flat,
        token_T=np.pad(flat.token_T, (0, more_tokens)),
        position_T=np.pad(flat.position_T, (0, more_tokens)),
        slot_T=np.concatenate((flat.slot_T, book.dummy_slots(num_dummies)[flat.num_dummies :])),
        table_VP=np.pad(flat.table_VP, ((0, more_rows), (0, 0))),
        query_ends=[*flat.query_ends, *range(first, first + more_rows - 1), num_tokens],
        kv_lengths=[*flat.kv_lengths, *[1] * more_rows],
        num_dummies=num_dummies,
    )


def filler(num_tokens: int, num_rows: int, num_pages: int, kv_length: int, book: PageBook) -> FlatStep:
    """A step of padding alone, at the largest lengths: what a shape is captured on, so that its workspace suffices."""
    zeros = np.zeros(num_tokens, dtype=np.int64)
    return FlatStep(
        token_T=zeros,
        position_T=zeros,
        slot_T=book.dummy_slots(num_tokens),
        table_VP=np.zeros((num_rows, num_pages), dtype=np.int64),
        query_ends=[*range(1, num_rows), num_tokens],
        kv_lengths=[kv_length] * num_rows,
        read_M=zeros[:0],
        copies=[],
        num_dummies=num_tokens,
    )


class Reads:
    """Which entries each rank puts through the head, in the order of its rows, and where their predictions belong."""

    def __init__(self, plan: StepPlan, rows_of: list[Int]) -> None:
        entries_of = [plan.entries_of(rows) for rows in rows_of]
        self._num_tokens = plan.num_tokens
        self._entries_of = [entry_N[plan.is_read_T[entry_N]] for entry_N in entries_of]
        self.most = max(1, *(len(entry_M) for entry_M in self._entries_of))

    def predictions(self, predicted_PM3: np.ndarray) -> Predictions:
        """In the plan's order; a row computed on several ranks counts once, from the first."""
        values_3T = np.zeros((3, self._num_tokens), dtype=np.float32)
        for rank in reversed(range(len(self._entries_of))):
            entry_M = self._entries_of[rank]
            values_3T[:, entry_M] = predicted_PM3[rank, : len(entry_M)].T
        return Predictions(values_3T)

    def sampling_fields(self, plan: StepPlan, rank: int, num_reads: int) -> Int32:
        """[6, num_reads]: how each prediction of this rank is drawn, as `SamplingRows.of` takes it."""
        entry_M = self._entries_of[rank]
        row_M = plan.first_R.searchsorted(entry_M, side="right") - 1
        position_M = plan.position_T[entry_M] + 1
        assert plan.sampling_3R is not None, "rows are drawn"
        settings_3M = plan.sampling_3R[:, row_M]
        return sampling_fields(settings_3M, plan.noise_key_R[row_M], plan.step_R[row_M], position_M, num_reads)
