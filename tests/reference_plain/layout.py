"""From the branches of all requests to the arrays of one forward pass (StepPlan).

A row holds its window's positions first and its shift entries behind them. Of a model without shift, position p is
predicted by its own entry. With it, by the entry of p - 1: inside the window by its left neighbour, at the window's
first position by the carry, and with `shift_row: fresh` by a shift entry, a second query of position p - 1 that sees
what p sees and provides no key.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from common.decoding.plan import (
    Bool,
    CommitSpan,
    Float,
    Int,
    RowField,
    Sampling,
    StepPlan,
    part,
)
from reference_plain.changes import with_changes
from reference_plain.state import Aligned, PlainRequest, RequestStep

_START, _CACHED, _STEP = int(RowField.START), int(RowField.CACHED), int(RowField.STEP)


class _Part(NamedTuple):
    """One request's part of the plan, as if it were the only one."""

    entries_3T: Int
    is_read_T: Bool
    row_fields_8R: Int


def lay_out(steps: list[RequestStep], sampling: Sampling) -> StepPlan:
    """Rows of every request behind one another."""
    parts = [_part_of(step) for step in steps]
    arrays = parts[0] if len(parts) == 1 else _behind_one_another(parts)
    request_R = np.zeros(steps[-1].end_row, dtype=np.int64)
    commits = []
    for index, step in enumerate(steps):
        window = step.window
        if index:
            request_R[step.first_row : step.end_row] = index
        if window.commit_length:
            span = step.decoding.slot, window.start, window.commit_length
            commits.append(CommitSpan(index, *span, is_final=not window.is_tentative))
    # The same for all: SHARED_SETTINGS of the scheduler.
    commits_locally = steps[0].decoding.rules.decode.window_attention == "block_causal"
    commits_locally = commits_locally and not any(step.window.is_tentative for step in steps)
    sampling_3R = _sampling_of(steps)
    own = sampling.of_rows(sampling_3R)
    plan = StepPlan(*arrays, request_R, tuple(commits), own, commits_locally, sampling_3R)
    return with_changes(plan, steps) if sampling.is_special else plan


def _behind_one_another(parts: list[_Part]) -> _Part:
    entries_3T, is_read_T, row_fields_8R = (np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True))
    *first_N, _ = accumulate([len(own.is_read_T) for own in parts], initial=0)
    row_fields_8R[RowField.FIRST] += np.repeat(first_N, [own.row_fields_8R.shape[1] for own in parts])
    return _Part(entries_3T, is_read_T, row_fields_8R)


def _sampling_of(steps: list[RequestStep]) -> Float | None:
    """StepPlan.sampling_3R."""
    if not [step for step in steps if step.decoding.rules.is_sampled]:
        return None
    of_request_N3 = np.array([step.decoding.rules.sampling for step in steps], dtype=np.float32)
    sampling_3R: Float = of_request_N3.T.repeat([len(step.widths) for step in steps], axis=1)
    return sampling_3R


def _row_fields_of(step: RequestStep) -> Int:
    """StepPlan.row_fields_8R."""
    window, same_81 = step.window, step.decoding.row_fields_81
    same_81[_START, 0] = window.start
    same_81[_CACHED, 0] = max(window.cached, window.start)
    same_81[_STEP, 0] = step.decoding.num_forwards
    fields_8B: Int = step.spans.fields_8B + same_81  # each is 0 where the other is not
    return fields_8B


def _part_of(step: RequestStep) -> _Part:
    """Every row as the anchor has it, but for the lookaheads' own tokens, which nothing need predict."""
    decoding, spans, start = step.decoding, step.spans, step.window.start
    shift, branches = decoding.rules.shift, decoding.branches
    entries_3T: Int = spans.columns_3T + start
    token_T, position_T = part(entries_3T, 0), part(entries_3T, 1)
    decoding.token_S.take(position_T, out=token_T, mode="clip")  # numpy checks into a copy of `out` otherwise
    is_read_T: Bool = decoding.is_masked_S[shift:].take(position_T, mode="clip")  # the last position predicts none
    is_read_T &= spans.predicts_T
    for first, position, token in zip(spans.firsts, branches.positions, branches.tokens, strict=False):
        entry = first + position - start
        token_T[entry] = token
        if position >= start + shift:
            is_read_T[entry - shift] = False
    if decoding.rules.decode.edit_threshold is not None and not shift:
        is_read_T |= _is_edited(step).take(position_T - start)
    if step.shift_column_of:
        _change_shift_entries(step, token_T, is_read_T)
    if step.reads_carry:
        is_read_T[spans.fields_8B[RowField.FIRST] + (step.window.next_start - start - 1)] = True
    if step.window.predicts_next:
        is_read_T[spans.behind_keys_B - 1] = True
    return _Part(entries_3T, is_read_T, _row_fields_of(step))


def _change_shift_entries(step: RequestStep, token_T: Int, is_read_T: Bool) -> None:
    """Where a lookahead's token stands in front of a block or begins it."""
    column_of, branches = step.shift_column_of, step.decoding.branches
    begins = step.spans.behind_keys_B.tolist()
    for begin, position, token in zip(begins, branches.positions, branches.tokens, strict=False):
        if position + 1 in column_of:
            token_T[begin + column_of[position + 1]] = token
        if position in column_of:
            is_read_T[begin + column_of[position]] = False


def masks_of(step: RequestStep) -> Bool:
    """[B, W]: every branch's masks among the blocks that it has opened."""
    start, end = step.window.start, step.window.end
    is_masked_BW = np.empty((len(step.widths), end - start), dtype=np.bool_)
    is_masked_BW[:] = step.decoding.is_masked_S[start:end]
    for row, position in enumerate(step.decoding.branches.positions):
        is_masked_BW[row, position - start] = False
    for row, own_end in enumerate(step.spans.ends):
        if own_end < end - start:
            is_masked_BW[row, own_end:] = False
    return is_masked_BW


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


def unaligned(step: RequestStep) -> Float:
    """[3, B, W], into which `align` moves predictions; what no entry of the step predicts is there already."""
    shape = 3, len(step.widths), step.window.end - step.window.start
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
