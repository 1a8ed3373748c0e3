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
    RowField,
    Sampling,
    StepPlan,
)
from common.decoding.scheduling.plain.changes import with_changes
from common.decoding.scheduling.plain.state import Aligned, PlainRequest, RequestStep

_START, _CACHED, _STEP = int(RowField.START), int(RowField.CACHED), int(RowField.STEP)


def lay_out(steps: list[RequestStep], sampling: Sampling) -> StepPlan:
    """Rows of every request behind one another."""
    num_rows, num_tokens = steps[-1].end_row, sum([step.spans.num_entries for step in steps])
    entries_3T = np.empty((3, num_tokens), dtype=np.int64)
    is_read_T = np.zeros(num_tokens, dtype=np.bool_)
    row_fields_8R = np.empty((8, num_rows), dtype=np.int64)
    request_R = np.zeros(num_rows, dtype=np.int64)
    commits, first = [], 0
    for index, step in enumerate(steps):
        spans, window = step.spans, step.window
        rows, own = slice(step.first_row, step.end_row), slice(first, first + spans.num_entries)
        if index:
            request_R[rows] = index
        _fill_row_fields(step, first, row_fields_8R[:, rows])
        _fill(step, entries_3T[:, own], is_read_T[own])
        if window.commit_length:
            span = step.decoding.slot, window.start, window.commit_length
            commits.append(CommitSpan(index, *span, is_final=not window.is_tentative))
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
    window, same_81 = step.window, step.decoding.row_fields_81
    same_81[_START, 0] = window.start
    same_81[_CACHED, 0] = max(window.cached, window.start)
    same_81[_STEP, 0] = step.decoding.num_forwards
    fields_8B[:] = same_81
    fields_8B[:_START] = step.spans.rows_3B  # differ from row to row
    if first_entry:
        fields_8B[RowField.FIRST] += first_entry


def _sampling_of(steps: list[RequestStep]) -> Float | None:
    """StepPlan.sampling_3R."""
    if not [step for step in steps if step.decoding.rules.is_sampled]:
        return None
    of_request_N3 = np.array([step.decoding.rules.sampling for step in steps], dtype=np.float32)
    sampling_3R: Float = of_request_N3.T.repeat([len(step.widths) for step in steps], axis=1)
    return sampling_3R


def _fill(step: RequestStep, entries_3T: Int, is_read_T: Bool) -> None:
    """The request's part of the plan."""
    decode = step.decoding.rules.decode
    _fill_windows(step, decode, entries_3T)
    _mark_reads(step, decode, is_read_T)
    start, token_T = step.window.start, entries_3T[0]
    branches, firsts = step.decoding.branches, step.spans.firsts
    for first, position, token in zip(firsts, branches.positions, branches.tokens, strict=False):
        token_T[first + position - start] = token
    if step.shift_column_of:
        _fill_shift_entries(step, decode, entries_3T, is_read_T)


def _fill_windows(step: RequestStep, decode: DecodeConfig, entries_3T: Int) -> None:
    """Every row's keys as the anchor has them."""
    if step.spans.is_even:
        width = step.widths[0]
        entries_3T.reshape(3, len(step.widths), -1)[:, :, :width] = _window_of(step, decode, width)[:, None]
    else:
        window_of = {width: _window_of(step, decode, width) for width in set(step.widths)}
        for first, width in zip(step.spans.firsts, step.widths, strict=True):
            entries_3T[:, first : first + width] = window_of[width]


def _window_of(step: RequestStep, decode: DecodeConfig, width: int) -> Int:
    """[3, W]: the anchor's entries, as a row of this width has them."""
    start, end = step.window.start, step.window.start + width
    window_3W: Int = step.decoding.entries_3S[:, start:end].copy()
    if decode.window_attention == "full":
        window_3W[2] = end
    return window_3W


def _mark_reads(step: RequestStep, decode: DecodeConfig, is_read_T: Bool) -> None:
    """Entries of windows that predict a mask, or what the next step carries or begins with."""
    spans, window, shift = step.spans, step.window, step.decoding.rules.shift
    is_predicted_BW = step.is_masked_BW[:, shift:]
    if decode.edit_threshold is not None and not shift:
        is_predicted_BW = is_predicted_BW | _is_edited(step)
    if spans.is_even:
        num_rows, width = is_predicted_BW.shape
        is_read_T.reshape(num_rows, -1)[:, :width] = is_predicted_BW
    else:
        for first, width, is_predicted_W in zip(spans.firsts, step.widths, is_predicted_BW, strict=True):
            is_read_T[first : first + width - shift] = is_predicted_W[: width - shift]
    if step.reads_carry:
        is_read_T[spans.rows_3B[RowField.FIRST] + (window.next_start - window.start - 1)] = True
    if window.predicts_next:
        is_read_T[spans.behind_keys_B - 1] = True


def _is_edited(step: RequestStep) -> Bool:
    """[W] positions whose filled tokens the step may replace: of active blocks, behind the prompt."""
    is_edited_W = np.zeros(step.window.end - step.window.start, dtype=np.bool_)
    for block in step.decoding.strategy.fillable(step.decoding.blocks, step.decoding.is_refreshed):
        first = max(block.start, step.decoding.prompt_length)
        is_edited_W[first - step.window.start : block.end - step.window.start] = True
    return is_edited_W


def shift_columns(step_start: int, step_end: int, decoding: PlainRequest) -> dict[int, int]:
    """Starts of the blocks whose first position is predicted by a shift entry, and its column behind the keys.

    In full attention only the first position behind the cache needs one: every later predictor is in the window and
    sees all of it. Under block-causal attention no predictor sees the block behind it, so every block's first
    position does.
    """
    decode, is_masked_S = decoding.rules.decode, decoding.is_masked_S
    if decode.shift_row == "stale" or not (decoding.rules.shift and decoding.strategy.keeps_carry):
        return {}
    if decode.window_attention == "full":
        return {step_start: 0} if step_start and is_masked_S[step_start] else {}
    starts = range(decoding.prompt_length, step_end, decode.block_size)
    masked = [start for start in starts if start >= step_start and is_masked_S[start]]
    return {start: column for column, start in enumerate(masked)}


def _fill_shift_entries(step: RequestStep, decode: DecodeConfig, entries_3T: Int, is_read_T: Bool) -> None:
    """Behind the keys of each row an entry for each of the X blocks."""
    decoding, start, column_of = step.decoding, step.window.start, step.shift_column_of
    start_X = np.array([*column_of], dtype=np.int64)
    before_X, end_B1 = start_X - 1, start + step.spans.rows_3B[RowField.NUM_KEYS, :, None]
    entries_3BX = np.empty((3, len(end_B1), len(start_X)), dtype=np.int64)
    entries_3BX[0] = decoding.token_S.take(before_X)
    entries_3BX[1] = before_X
    entries_3BX[2] = end_B1 if decode.window_attention == "full" else start_X + decode.block_size
    for row, (position, token) in enumerate(zip(decoding.branches.positions, decoding.branches.tokens, strict=True)):
        if position + 1 in column_of:
            entries_3BX[0, row, column_of[position + 1]] = token
    entry_BX = step.spans.behind_keys_B[:, None] + np.arange(len(start_X))
    entries_3T[:, entry_BX] = entries_3BX
    is_read_T[entry_BX] = step.is_masked_BW.take(start_X - start, axis=1) & (start_X < end_B1)
    for before in before_X.tolist():
        if before >= start:  # the shift entry predicts what this one did
            is_read_T[step.spans.rows_3B[RowField.FIRST] + (before - start)] = False


def unaligned(step: RequestStep) -> Float:
    """[3, B, W], into which `align` moves predictions; what no entry of the step predicts is there already."""
    shape = 3, *step.is_masked_BW.shape
    values_3BW: Float = np.empty(shape, np.float32) if step.spans.is_even else np.zeros(shape, np.float32)
    if step.decoding.rules.shift and step.window.start not in step.shift_column_of:
        values_3BW[:, :, 0] = step.decoding.carry_31
    return values_3BW


def align(step: RequestStep, values_3T: Float, values_3BW: Float) -> Aligned:
    """Move every prediction to the position it speaks of (docs/architecture.md, 'Positions own their predictors').
    values_3T: of the request's entries. values_3BW: from `unaligned`."""
    shift, spans = step.decoding.rules.shift, step.spans
    if spans.is_even:
        _, num_rows, width = values_3BW.shape
        values_3BW[:, :, shift:] = values_3T.reshape(3, num_rows, -1)[:, :, : width - shift]
    else:
        for row, (first, width) in enumerate(zip(spans.firsts, step.widths, strict=True)):
            values_3BW[:, row, shift:width] = values_3T[:, first : first + width - shift]
    for block_start, column in step.shift_column_of.items():
        values_3BW[:, :, block_start - step.window.start] = values_3T[:, spans.behind_keys_B + column]
    if step.window.predicts_next:
        return Aligned(values_3BW, values_3T[:, spans.behind_keys_B - 1])
    return Aligned(values_3BW)
