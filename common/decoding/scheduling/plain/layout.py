"""From the branches of all requests to the arrays of one forward pass (StepPlan).

A row holds its window's positions first and its shift entries behind them. Of a model without shift, position p is
predicted by its own entry. With it, by the entry of p - 1: inside the window by its left neighbour, at the window's
first position by the carry, and with `shift_row: fresh` by a shift entry, a second query of position p - 1 that sees
what p sees and provides no key.
"""

from __future__ import annotations

import numpy as np

from common.config import DecodeConfig
from common.decoding.plan import (
    Bool,
    CommitSpan,
    Float,
    Int,
    Predictions,
    RowField,
    Sampling,
    StepPlan,
)
from common.decoding.scheduling.plain.changes import with_changes
from common.decoding.scheduling.plain.state import Aligned, PlainRequest, RequestStep


def lay_out(steps: list[RequestStep], sampling: Sampling) -> StepPlan:
    """Rows of every request behind one another."""
    num_rows, num_tokens = steps[-1].end_row, sum([step.spans.num_entries for step in steps])
    entries_3T = np.empty((3, num_tokens), dtype=np.int64)
    is_read_T = np.zeros(num_tokens, dtype=np.bool_)
    row_fields_8R = np.empty((8, num_rows), dtype=np.int64)
    request_R = np.empty(num_rows, dtype=np.int64)
    commits, first = [], 0
    for index, step in enumerate(steps):
        rows, own = slice(step.first_row, step.end_row), slice(first, first + step.spans.num_entries)
        request_R[rows] = index
        _fill_row_fields(step, first, row_fields_8R[:, rows])
        _fill(step, entries_3T[:, own], is_read_T[own])
        if step.window.commit_length:
            span = step.decoding.slot, step.window.start, step.window.commit_length
            commits.append(CommitSpan(index, *span, is_final=not step.window.is_tentative))
        first = own.stop
    # The same for all: SHARED_SETTINGS of the scheduler.
    commits_locally = steps[0].decoding.rules.decode.window_attention == "block_causal"
    commits_locally = commits_locally and not any(step.window.is_tentative for step in steps)
    sampling_3R = _sampling_of(steps)
    plan = StepPlan(
        entries_3T,
        is_read_T,
        row_fields_8R,
        request_R,
        tuple(commits),
        sampling.of_rows(sampling_3R),
        commits_locally,
        sampling_3R,
    )
    return with_changes(plan, steps) if sampling.is_special else plan


def _fill_row_fields(step: RequestStep, first_entry: int, fields_8B: Int) -> None:
    """The request's part of StepPlan.row_fields_8R, in the order of RowField."""
    decoding, window = step.decoding, step.window
    fields_8B[: RowField.START] = step.spans.rows_3B
    if first_entry:
        fields_8B[RowField.FIRST] += first_entry
    cached = max(window.cached, window.start)
    same = (window.start, cached, decoding.slot, decoding.noise_key, decoding.num_forwards)
    fields_8B[RowField.START :] = np.array(same, dtype=np.int64)[:, None]


def _sampling_of(steps: list[RequestStep]) -> Float | None:
    """StepPlan.sampling_3R."""
    if not any(step.decoding.rules.is_sampled for step in steps):
        return None
    of_request_N3 = np.array([step.decoding.rules.sampling for step in steps], dtype=np.float32)
    sampling_3R: Float = of_request_N3.T.repeat([len(step.ends) for step in steps], axis=1)
    return sampling_3R


def _fill(step: RequestStep, entries_3T: Int, is_read_T: Bool) -> None:
    """The request's part of the plan: in place where its branches are equally long, else from a rectangle as wide as
    the longest."""
    decode, shape, is_even = step.decoding.rules.decode, step.spans.shape, step.spans.is_even
    entries_3BW = entries_3T.reshape(3, *shape) if is_even else np.empty((3, *shape), dtype=np.int64)
    is_read_BW = is_read_T.reshape(shape) if is_even else np.zeros(shape, dtype=np.bool_)
    _fill_window(step, decode, entries_3BW, is_read_BW)
    if step.shift_column_of:
        _fill_shift_entries(step, decode, entries_3BW, is_read_BW)
    if not is_even:
        for index, own in enumerate(step.spans.entries):
            entries_3T[:, own] = entries_3BW[:, index, : own.stop - own.start]
            is_read_T[own] = is_read_BW[index, : own.stop - own.start]


def _fill_window(step: RequestStep, decode: DecodeConfig, entries_3BW: Int, is_read_BW: Bool) -> None:
    decoding, start, end = step.decoding, step.window.start, step.window.end
    width = end - start
    token_BW, position_BW, horizon_BW = entries_3BW[0], entries_3BW[1], entries_3BW[2]
    token_BW[:, :width] = decoding.token_S[start:end]
    position_BW[:, :width] = np.arange(start, end)
    if decoding.rules.shift:
        is_read_BW[:, : width - 1] = step.is_masked_BW[:, 1:]
        if step.reads_carry:
            is_read_BW[:, step.window.next_start - start - 1] = True
        if step.window.predicts_next:
            is_read_BW[:, width - 1] = True
    else:
        is_read_BW[:, :width] = step.is_masked_BW
        if decode.edit_threshold is not None:
            is_read_BW[:, :width] |= _is_edited(step)
    if decode.window_attention == "full":
        horizon_BW[:, :width] = end
    else:
        horizon_BW[:, :width] = _block_end(start, end, decoding.strategy.origin, decode.block_size)
    for index, branch in enumerate(decoding.branches):
        if branch.position is not None:
            token_BW[index, branch.position - start] = branch.token
    if not step.spans.is_even and decode.window_attention == "full":
        for index, own_end in enumerate(step.ends):
            horizon_BW[index, : own_end - start] = own_end


def _is_edited(step: RequestStep) -> Bool:
    """[W] positions whose filled tokens the step may replace: of active blocks, behind the prompt."""
    is_edited_W = np.zeros(step.window.end - step.window.start, dtype=np.bool_)
    for block in step.decoding.strategy.fillable(step.decoding.blocks, step.decoding.is_refreshed):
        first = max(block.start, step.decoding.prompt_length)
        is_edited_W[first - step.window.start : block.end - step.window.start] = True
    return is_edited_W


def _block_end(start: int, end: int, origin: int | None, block_size: int) -> Int:
    """End of the block that each position of [start, end) lies in; what lies before the origin is one block."""
    origin = origin or 0
    first_end = origin + max((start - origin) // block_size + 1, 0) * block_size
    end_W = np.empty(end - start, dtype=np.int64)
    end_W[: first_end - start] = first_end
    if first_end < end:
        ends = np.arange(first_end + block_size, end + block_size, block_size)
        end_W[first_end - start :] = ends.repeat(block_size)[: end - first_end]
    return end_W


def shift_entries(step_start: int, step_end: int, decoding: PlainRequest) -> list[int]:
    """Starts of the blocks whose first position is predicted by a shift entry.

    In full attention only the first position behind the cache needs one: every later predictor is in the window and
    sees all of it. Under block-causal attention no predictor sees the block behind it, so every block's first
    position does.
    """
    decode, is_masked_S = decoding.rules.decode, decoding.is_masked_S
    if decode.shift_row == "stale" or not (decoding.rules.shift and decoding.strategy.keeps_carry):
        return []
    if decode.window_attention == "full":
        return [step_start] if step_start and is_masked_S[step_start] else []
    starts = range(decoding.prompt_length, step_end, decode.block_size)
    return [start for start in starts if start >= step_start and is_masked_S[start]]


def _fill_shift_entries(step: RequestStep, decode: DecodeConfig, entries_3BW: Int, is_read_BW: Bool) -> None:
    """Behind the keys of each row an entry for each of the X blocks."""
    decoding, start, column_of = step.decoding, step.window.start, step.shift_column_of
    is_full, start_X = decode.window_attention == "full", np.array([*column_of], dtype=np.int64)
    entries_3BX = np.empty((3, len(step.ends), len(start_X)), dtype=np.int64)
    entries_3BX[1] = before_X = start_X - 1
    entries_3BX[0] = decoding.token_S.take(before_X)
    entries_3BX[2] = step.window.end if is_full else start_X + decode.block_size
    is_read_BX = step.is_masked_BW.take(start_X - start, axis=1)
    for index, branch in enumerate(decoding.branches):
        if branch.position is not None and branch.position + 1 in column_of:
            entries_3BX[0, index, column_of[branch.position + 1]] = branch.token
    if step.spans.is_even:
        columns = slice(step.ends[0] - start, None)
        entries_3BW[:, :, columns] = entries_3BX
        is_read_BW[:, columns] = is_read_BX
    else:
        for index, end in enumerate(step.ends):
            columns = slice(end - start, end - start + len(start_X))
            entries_3BW[:, index, columns] = entries_3BX[:, index]
            is_read_BW[index, columns] = is_read_BX[index] & (start_X < end)
            if is_full:
                entries_3BW[2, index, columns] = end
    for before in before_X.tolist():
        if before >= start:
            is_read_BW[:, before - start] = False  # the shift entry predicts what this one did


def align(steps: list[RequestStep], predictions: Predictions) -> list[Aligned]:
    """Move every prediction to the position it speaks of (docs/architecture.md, 'Positions own their predictors')."""
    aligned, first = [], 0
    for step in steps:
        count = step.spans.num_entries
        aligned.append(_align(step, predictions.values_3T[:, first : first + count]))
        first += count
    return aligned


def _align(step: RequestStep, values_3T: Float) -> Aligned:
    start, width, num_shifts = step.window.start, step.window.end - step.window.start, len(step.shift_column_of)
    if not step.decoding.rules.shift:
        return Aligned(_own_predictions(step, values_3T, width))
    aligned_3BW = np.zeros((3, len(step.ends), width), dtype=np.float32)
    if step.spans.is_even:
        values_3BE = values_3T.reshape(3, len(step.ends), -1)
        aligned_3BW[:, :, 1:] = values_3BE[:, :, : width - 1]
        for block_start, shift_column in step.shift_column_of.items():
            aligned_3BW[:, :, block_start - start] = values_3BE[:, :, width + shift_column]
    else:
        for index, own in enumerate(step.spans.entries):
            num_keys = own.stop - own.start - num_shifts
            aligned_3BW[:, index, 1:num_keys] = values_3T[:, own.start : own.start + num_keys - 1]
        first_shift_B = step.spans.end_B - num_shifts
        for block_start, shift_column in step.shift_column_of.items():
            aligned_3BW[:, :, block_start - start] = values_3T[:, first_shift_B + shift_column]
    if start not in step.shift_column_of:
        aligned_3BW[:, :, 0] = step.decoding.carry_31
    if step.window.predicts_next:
        return Aligned(aligned_3BW, values_3T[:, step.spans.end_B - num_shifts - 1])
    return Aligned(aligned_3BW)


def _own_predictions(step: RequestStep, values_3T: Float, width: int) -> Float:
    """[3, B, W] where every position is predicted by its own entry."""
    if step.spans.is_even:
        return values_3T.reshape(3, len(step.ends), width)
    aligned_3BW = np.zeros((3, len(step.ends), width), dtype=np.float32)
    for index, own in enumerate(step.spans.entries):
        aligned_3BW[:, index, : own.stop - own.start] = values_3T[:, own]
    return aligned_3BW
