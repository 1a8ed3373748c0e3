"""Which rows of a plan each branch-parallel rank computes, laid out one behind another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.decoding import NUM_UPLOADED_FIELDS, Int, RowField, StepPlan


class Share(NamedTuple):
    """One rank's rows, or pieces of rows (lopa_cuda.steps.slices).

    spans_6R: the first fields of StepPlan.row_fields_8R, first entries counted in the share; of a piece its own entries
        and its row's keys.
    entry_T: the plan's entry at each of the share's; None: all of them in the plan's order.
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
        """Of the row at this place of the share."""
        return int(self.spans_6R[0, place])

    def of_entries(self, block: Int) -> Int:
        """This share of an array whose last axis is the plan's entries."""
        return block if self.entry_T is None else block.take(self.entry_T, axis=-1)

    def in_plan(self, token_N: Int) -> Int:
        """The plan's entries of these tokens."""
        return token_N if self.entry_T is None else self.entry_T[token_N]


def deal(plan: StepPlan, row_of: Int) -> list[Share]:
    """row_of [P, R]: the plan's row computed at each rank's place; a single rank computes all in their order."""
    if len(row_of) == 1:
        return [Share(plan.row_fields_8R[:NUM_UPLOADED_FIELDS], None, plan.num_tokens)]
    rows = row_of.reshape(-1)
    spans_6PR = plan.row_fields_8R[:NUM_UPLOADED_FIELDS, rows].reshape(NUM_UPLOADED_FIELDS, *row_of.shape)
    end_PR = spans_6PR[RowField.NUM_ENTRIES].cumsum(axis=1)
    np.subtract(end_PR, spans_6PR[RowField.NUM_ENTRIES], out=spans_6PR[RowField.FIRST])
    entry_T, shares, begin = plan.entries_of(rows), [], 0
    for rank, num_tokens in enumerate(end_PR[:, -1].tolist()):
        shares.append(Share(spans_6PR[:, rank], entry_T[begin : begin + num_tokens], num_tokens))
        begin += num_tokens
    return shares
