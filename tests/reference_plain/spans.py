"""What the rows of one request's step hold besides tokens and masks: it depends on their lengths alone, and is counted
from the window's start, so it is the same for several steps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from common.decoding.plan import Bool, Int, RowField


class Spans(NamedTuple):
    """How long rows are, where they lie among the request's entries, and what each entry is.

    ends: of each row, the column behind which it has no masks. firsts, behind_keys_B: where the keys of each begin, and
    where they have ended. is_even: all are equally long.
    columns_3T: StepPlan.entries_3T of a window that starts at position 0, without tokens. predicts_T: entries that
    predict a position in front of their row's end.
    fields_8B: StepPlan.row_fields_8R as far as rows differ, of a request that comes first in its step.
    """

    ends: tuple[int, ...]
    firsts: list[int]
    behind_keys_B: Int
    num_entries: int
    is_even: bool
    columns_3T: Int
    predicts_T: Bool
    fields_8B: Int


class CausalBlocks(NamedTuple):
    """Whose ends are the horizons of block-causal attention. num_before: positions between where they are counted from
    and the window."""

    num_before: int
    size: int

    def end_of(self, column_T: Int) -> Int:
        end_T: Int = np.maximum((column_T + self.num_before) // self.size + 1, 0) * self.size - self.num_before
        return end_T


@lru_cache(maxsize=128)
def spans_of(
    widths: tuple[int, ...],
    ends: tuple[int, ...],
    shift: int,
    shift_columns: tuple[int, ...],
    causal: CausalBlocks | None,
) -> Spans:
    """Of rows of so many keys. shift_columns: behind each row's keys stands an entry that predicts the position in each
    of these columns. causal: None where the whole window sees itself."""
    num_rows, shift_X = len(widths), np.array(shift_columns, dtype=np.int64)
    lengths = [width + len(shift_columns) for width in widths]
    *firsts, num_entries = accumulate(lengths, initial=0)
    fields_8B = np.zeros((len(RowField), num_rows), dtype=np.int64)
    fields_8B[: RowField.START] = firsts, lengths, widths
    first_B, behind_keys_B = fields_8B[0], fields_8B[0] + widths
    columns_3T = np.zeros((3, num_entries), dtype=np.int64)
    columns_3T[1] = _behind_keys(widths, shift_X - 1)
    if causal is None:
        columns_3T[2] = np.array(widths).repeat(lengths)
    else:
        columns_3T[2] = causal.end_of(_behind_keys(widths, shift_X))  # they see what the predicted position does
    predicts_T: Bool = columns_3T[1] + shift < np.minimum(widths, ends).repeat(lengths)
    for column in shift_columns:
        if column:  # the shift entry predicts what this one did
            predicts_T[first_B + column - 1] = False
    for shared in (behind_keys_B, columns_3T, predicts_T, fields_8B):
        shared.flags.writeable = False
    return Spans(
        ends, firsts, behind_keys_B, num_entries, len(set(widths)) == 1, columns_3T, predicts_T, fields_8B
    )  # fmt: skip


def _behind_keys(widths: Iterable[int], column_X: Int) -> Int:
    """Columns of every row's keys, and these behind them."""
    widths = [*widths]
    column_W = np.arange(max(widths))
    return np.concatenate([part for width in widths for part in (column_W[:width], column_X)])
