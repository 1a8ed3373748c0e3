"""Which rows of a plan each branch-parallel rank computes, laid out one after another."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from common.decoding import NUM_UPLOADED_FIELDS, Int, RowField, StepPlan, entries_from


class Share(NamedTuple):
    """One rank's rows, or pieces of rows (lopa_cuda.steps.slices).

    spans_6R: the first fields of StepPlan.row_fields_8R, first entries counted in the share. A piece has
        its own entries and the keys of its row.
    entry_T: the plan's entry at each entry of the share; None: all of them in the plan's order.
    first_key_R: where in the staging memory each row's keys begin, if they are not its entries in the share.
    """

    spans_6R: Int
    entry_T: Int | None
    num_tokens: int
    first_key_R: Int | None = None

    @property
    def num_entries_R(self) -> Int:
        found: Int = self.spans_6R[RowField.NUM_ENTRIES]
        return found

    def first_token(self, place: int) -> int:
        """First token of the row at this place of the share."""
        return int(self.spans_6R[0, place])

    def of_entries(self, block: Int) -> Int:
        """This share of an array whose last axis is the plan's entries."""
        return block if self.entry_T is None else block.take(self.entry_T, axis=-1)

    def in_plan(self, token_N: Int) -> Int:
        """The plan's entries of these tokens."""
        return token_N if self.entry_T is None else self.entry_T[token_N]


def deal(plan: StepPlan, row_of: Int) -> list[Share]:
    """Give each rank its rows. row_of [P, R]: the plan's row computed at each rank's place; a single rank computes all
    in their order."""
    if len(row_of) == 1:
        return [Share(plan.row_fields_8R[:NUM_UPLOADED_FIELDS], None, plan.num_tokens)]
    deal = _deal_of(plan.num_entries_R.tobytes(), row_of.tobytes(), len(row_of))
    spans_6R = plan.row_fields_8R[:NUM_UPLOADED_FIELDS].take(deal.rows, axis=1)
    spans_6PR = spans_6R.reshape(NUM_UPLOADED_FIELDS, *deal.first_PR.shape)
    spans_6PR[RowField.FIRST] = deal.first_PR
    return [Share(spans_6PR[:, rank], entry_T, len(entry_T)) for rank, entry_T in enumerate(deal.entries_of)]


class _Deal(NamedTuple):
    """What follows from the lengths of rows. rows: those of all ranks, rank after rank. first_PR: the first entry of
    each row in its share. entries_of: each share's entries, as the plan counts them."""

    rows: Int
    first_PR: Int
    entries_of: list[Int]


@lru_cache(maxsize=64)  # rows are of the same length for several steps
def _deal_of(num_entries: bytes, rows: bytes, num_ranks: int) -> _Deal:
    num_entries_R, rows_R = np.frombuffer(num_entries, dtype=np.int64), np.frombuffer(rows, dtype=np.int64)
    begin_R, row_length_R = num_entries_R.cumsum() - num_entries_R, num_entries_R.take(rows_R)
    row_length_PR = row_length_R.reshape(num_ranks, -1)
    end_PR = row_length_PR.cumsum(axis=1)
    entries_of = np.split(entries_from(begin_R.take(rows_R), row_length_R), end_PR[:-1, -1].cumsum())
    return _Deal(rows_R, end_PR - row_length_PR, entries_of)
