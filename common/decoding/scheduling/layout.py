"""From the branches of all requests to the arrays of one forward pass (StepPlan).

A row holds its window's positions first and its shift entries behind them. Position p is predicted by the entry of p
- 1: inside the window by its left neighbour, at the window's first position by the carry, and with `shift_row: fresh`
by a shift entry, a second query of position p - 1 that sees what p sees and provides no key.
"""

from __future__ import annotations

import numpy as np

from common.config import DecodeConfig
from common.decoding.plan import Bool, CommitSpan, Int, Predictions, Sampling, StepPlan
from common.decoding.scheduling.state import Aligned, RequestStep

UNBOUNDED = int(np.iinfo(np.int32).max)  # padding may look at everything in its row, so that it stays finite


def lay_out(steps: list[RequestStep], sampling: Sampling) -> StepPlan:
    """Rows of every request below one another, padded to the widest."""
    num_rows = steps[-1].end_row
    width = max(step.window.end - step.window.start + len(step.shift_column_of) for step in steps)
    entries_3RW = np.zeros((3, num_rows, width), dtype=np.int64)
    entries_3RW[2] = UNBOUNDED
    is_read_RW = np.zeros((num_rows, width), dtype=np.bool_)
    row_fields_7R = np.empty((7, num_rows), dtype=np.int64)
    request_R = np.zeros(num_rows, dtype=np.int64)
    commits = []
    for index, step in enumerate(steps):
        rows, window, decode = slice(step.first_row, step.end_row), step.window, step.decoding.rules.decode
        request_R[rows] = index
        row_fields_7R[:, rows] = _per_row(step)
        _fill_window(step, decode, entries_3RW[:, rows], is_read_RW[rows])
        if step.shift_column_of:
            _fill_shift_entries(step, decode, entries_3RW[:, rows], is_read_RW[rows])
        if window.commit_length:
            commits.append(CommitSpan(index, step.decoding.slot, window.start, window.commit_length))
    # The same for all: SHARED_SETTINGS of the scheduler.
    commits_locally = steps[0].decoding.rules.decode.window_attention == "block_causal"
    return StepPlan(entries_3RW, is_read_RW, row_fields_7R, request_R, tuple(commits), sampling, commits_locally)


def _per_row(step: RequestStep) -> Int:
    """What StepPlan.row_fields_7R says of each branch, in the order of RowField."""
    decoding, start = step.decoding, step.window.start
    cached, num_shifts = max(step.window.cached, start), len(step.shift_column_of)
    columns = [
        (start, end - start, cached, decoding.slot, end - start + num_shifts, decoding.noise_key, decoding.num_forwards)
        for end in step.ends
    ]
    row_fields_7B: Int = np.array(columns, dtype=np.int64).T
    return row_fields_7B


def _fill_window(step: RequestStep, decode: DecodeConfig, entries_3BW: Int, is_read_BW: Bool) -> None:
    decoding, start, end = step.decoding, step.window.start, step.window.end
    width = end - start
    token_BW, position_BW, horizon_BW = entries_3BW
    token_BW[:, :width] = decoding.token_S[start:end]
    position_BW[:, :width] = np.arange(start, end)
    is_read_BW[:, : width - 1] = step.is_masked_BW[:, 1:]
    if step.window.commit_length and decode.shift_row == "stale":
        is_read_BW[:, step.window.next_start - start - 1] = True  # the next step's carry
    if decode.window_attention == "full":
        horizon_BW[:, :width] = end
    else:
        horizon_BW[:, :width] = _block_end(start, end, decoding.prompt_length, decode.block_size)
    for index, (branch, own_end) in enumerate(zip(decoding.branches, step.ends, strict=True)):
        if branch.position is not None:
            token_BW[index, branch.position - start] = branch.token
        if own_end < end:
            own_width = own_end - start
            if decode.window_attention == "full":
                horizon_BW[index, :own_width] = own_end
            token_BW[index, own_width:width] = 0
            position_BW[index, own_width:width] = 0
            horizon_BW[index, own_width:width] = UNBOUNDED


def _block_end(start: int, end: int, prompt_length: int, block_size: int) -> Int:
    """End of the block that each position of [start, end) lies in; the prompt is one block."""
    block_W = np.maximum((np.arange(start, end) - prompt_length) // block_size + 1, 0)
    return prompt_length + block_W * block_size


def shift_entries(
    step_start: int, step_end: int, prompt_length: int, is_masked_S: Bool, decode: DecodeConfig
) -> list[int]:
    """Starts of the blocks whose first position is predicted by a shift entry.

    In full attention only the first position behind the cache needs one: every later predictor is in the window and
    sees all of it. Under block-causal attention no predictor sees the block behind it, so every block's first
    position does.
    """
    if decode.shift_row == "stale":
        return []
    if decode.window_attention == "full":
        return [step_start] if step_start and is_masked_S[step_start] else []
    starts = range(prompt_length, step_end, decode.block_size)
    return [start for start in starts if start >= step_start and is_masked_S[start]]


def _fill_shift_entries(step: RequestStep, decode: DecodeConfig, entries_3BW: Int, is_read_BW: Bool) -> None:
    decoding, start = step.decoding, step.window.start
    for block_start, shift_column in step.shift_column_of.items():
        before = block_start - 1
        for index, (branch, end) in enumerate(zip(decoding.branches, step.ends, strict=True)):
            entry = end - start + shift_column
            token = branch.token if branch.position == before else decoding.token_S[before]
            horizon = end if decode.window_attention == "full" else block_start + decode.block_size
            entries_3BW[:, index, entry] = token, before, horizon
            if block_start < end:
                is_read_BW[index, entry] = step.is_masked_BW[index, block_start - start]
            if before >= start:
                is_read_BW[index, before - start] = False


def align(step: RequestStep, predictions: Predictions) -> Aligned:
    """Move every prediction to the position it speaks of (docs/architecture.md, 'Positions own their predictors')."""
    start, width = step.window.start, step.window.end - step.window.start
    values_3BW = predictions.values_3RW[:, step.first_row : step.end_row]
    aligned_3BW = np.empty((3, len(step.ends), width), dtype=np.float32)
    aligned_3BW[:, :, 1:] = values_3BW[:, :, : width - 1]
    aligned_3BW[:, :, 0] = step.decoding.carry_31
    for block_start, shift_column in step.shift_column_of.items():
        entry_B = np.array(step.ends) - start + shift_column
        aligned_3BW[:, :, block_start - start] = values_3BW[:, np.arange(len(entry_B)), entry_B]
    return Aligned(aligned_3BW)
