"""From the rows of all batches to the arrays of one forward pass (StepPlan).

Shapes: R rows, T tokens (all entries of all rows), X shift entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.decoding.plan import Bool, CommitSpan, Float, Int, Number, RowField, Sampling, StepPlan
from common.decoding.scheduling.arrays.batch import RequestBatch
from common.decoding.scheduling.arrays.counting import ONE, counting
from common.decoding.scheduling.arrays.rows import (
    END,
    FIRST,
    NEXT,
    NUM_ENTRIES,
    NUM_KEYS,
    OFFSET,
    PLACE,
    POSITION,
    SHIFT,
    TOKEN,
    Rows,
)

_NUM_FIELDS = len(RowField)


class Part(NamedTuple):
    """A batch's rows, and where they lie in the step.

    is_scored_T: of the part's entries, those that predict a masked position of their row.
    """

    rows: Rows
    is_scored_T: Bool
    entries: slice
    requests: slice
    first_row: int


def lay_out(rows_of_batches: list[Rows], sampling: Sampling) -> tuple[StepPlan, list[Part]]:
    """Rows of every batch behind one another."""
    parts, entries, reads, fields, requests = [], [], [], [], []
    commits: list[CommitSpan] = []
    first, first_row, num_requests = 0, 0, 0
    for rows in rows_of_batches:
        entries_3T, is_scored_T = _entries_of(rows)
        end, own_requests = first + len(is_scored_T), slice(num_requests, num_requests + len(rows.batch))
        parts.append(Part(rows, is_scored_T, slice(first, end), own_requests, first_row))
        entries.append(entries_3T)
        committed = rows.batch.commit_N.nonzero()[0]
        reads.append(_with_carried(rows, is_scored_T, committed))
        fields_8R = rows.fields_FR[:_NUM_FIELDS]
        if first:
            fields_8R = fields_8R.copy()
            fields_8R[RowField.FIRST] += first
        fields.append(fields_8R)
        requests.append(rows.request_R + num_requests if num_requests else rows.request_R)
        if committed.size:
            commits += _commits(rows.batch, committed, num_requests)
        first, first_row, num_requests = end, first_row + len(rows.request_R), own_requests.stop
    # The same for all: SHARED_SETTINGS of the scheduler.
    commits_locally = parts[0].rows.batch.kind.window_attention == "block_causal"
    sampling_3R = _sampling_of(rows_of_batches)
    plan = StepPlan(
        _joined(entries),
        _joined(reads),
        _joined(fields),
        _joined(requests),
        tuple(commits),
        sampling.of_rows(sampling_3R),
        commits_locally,
        sampling_3R,
    )
    return plan, parts


def _sampling_of(rows_of_batches: list[Rows]) -> Float | None:
    """StepPlan.sampling_3R."""
    if not any(rows.batch.is_sampled for rows in rows_of_batches):
        return None
    return np.concatenate([rows.batch.sampling_3N[:, rows.request_R] for rows in rows_of_batches], axis=1)


def _commits(batch: RequestBatch, committed: Int, first_request: int) -> Iterator[CommitSpan]:
    spans = batch.slot_N[committed].tolist(), batch.start_N[committed].tolist(), batch.commit_N[committed].tolist()
    return map(CommitSpan, (committed + first_request).tolist(), *spans)


def _joined(arrays: list[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    """Behind one another, along their last axis."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)


def _entries_of(rows: Rows) -> tuple[Int, Bool]:
    """StepPlan.entries_3T of these rows, and which of them predict a masked position of their row."""
    batch, fields_FR = rows.batch, rows.fields_FR
    entries_3T = fields_FR[PLACE : END + 1].repeat(fields_FR[NUM_ENTRIES], axis=1)
    token_T, position_T, horizon_T = entries_3T
    count_T = counting(len(token_T))
    token_T += count_T
    position_T += count_T
    # Each predicts the position behind its own.
    is_scored_T: Bool = batch.tokens.is_masked_S[1:].take(token_T, mode="clip")
    batch.tokens.token_S.take(token_T, out=token_T, mode="clip")
    # Nothing of the row lies behind its last key.
    is_scored_T[fields_FR[FIRST] + fields_FR[NUM_KEYS] - ONE] = False
    if batch.kind.window_attention == "block_causal":
        size, prompt_T = batch.kind.block_size, batch.prompt_N[rows.request_R].repeat(rows.num_entries_R)
        horizon_T[:] = prompt_T + np.maximum((position_T - prompt_T) // size + 1, 0) * size  # the prompt is one block
    lookahead_L = rows.branches.lookahead_L
    own_L = (fields_FR[POSITION] - fields_FR[SHIFT])[lookahead_L]
    token_T[own_L] = fields_FR[TOKEN][lookahead_L]
    own_L -= ONE
    is_scored_T[own_L] = False  # of a window's first position: the end of the row before
    if rows.shifts is not None:
        _write_shift_entries(rows, entries_3T, is_scored_T)
    return entries_3T, is_scored_T


def _with_carried(rows: Rows, is_scored_T: Bool, committed: Int) -> Bool:
    """StepPlan.is_read_T of these rows: besides what is scored, what the next step carries. committed: places of
    requests."""
    if not committed.size or rows.batch.kind.shift_row != "stale":
        return is_scored_T
    carried_R = rows.batch.commit_N[rows.request_R].nonzero()[0]
    next_entry_R = rows.fields_FR[NEXT] - rows.fields_FR[SHIFT]
    is_read_T: Bool = is_scored_T.copy()
    is_read_T[next_entry_R[carried_R] - ONE] = True
    return is_read_T


def _write_shift_entries(rows: Rows, entries_3T: Int, is_scored_T: Bool) -> None:
    assert rows.shifts is not None
    row_X, start_X, entry_X = rows.shifts
    batch, before_X = rows.batch, start_X - 1
    token_X = batch.tokens.token_S[rows.fields_FR[OFFSET, row_X] + before_X]
    token_X = np.where(rows.position_R[row_X] == before_X, rows.token_R[row_X], token_X)
    end_X = rows.fields_FR[END, row_X]
    horizon_X = end_X if batch.kind.window_attention == "full" else start_X + batch.kind.block_size
    entries_3T[:, entry_X] = token_X, before_X, horizon_X
    is_scored_T[entry_X] = (start_X < end_X) & (rows.position_R[row_X] != start_X)
    is_inside_X = (before_X >= rows.start_R[row_X]) & (before_X < end_X)
    is_scored_T[(before_X - rows.fields_FR[SHIFT, row_X])[is_inside_X]] = False
