"""From the branches of all requests to the arrays of one forward pass (StepPlan).

A row holds its window's positions first and its shift entries behind them. Position p is predicted by the entry of p
- 1: inside the window by its left neighbour, at the window's first position by the carry, and with `shift_row: fresh`
by a shift entry, a second query of position p - 1 that sees what p sees and provides no key.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from common.config import DecodeConfig
from common.plan import Bool, CommitSpan, Int, Predictions, Sampling, StepPlan
from common.state import Aligned, RequestStep

Number = TypeVar("Number", bound=np.generic)
UNBOUNDED = int(np.iinfo(np.int32).max)  # padding may look at everything in its row, so that it stays finite


def lay_out(steps: list[RequestStep], decode: DecodeConfig, sampling: Sampling) -> StepPlan:
    """Rows of every request below one another, padded to the widest."""
    num_rows = steps[-1].last_row
    shape = num_rows, max(step.window.end - step.window.start + len(step.shift_entry_of) for step in steps)
    token_RW, position_RW = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    horizon_RW, is_read_RW = np.full(shape, UNBOUNDED, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    per_row = np.empty((7, num_rows), dtype=np.int64)
    request_R = np.empty(num_rows, dtype=np.int64)
    for index, step in enumerate(steps):
        rows = slice(step.first_row, step.last_row)
        request_R[rows] = index
        _fill_per_row(step, per_row[:, rows])
        _fill_window(step, decode, token_RW[rows], position_RW[rows], horizon_RW[rows], is_read_RW[rows])
        _fill_shift_entries(step, decode, token_RW[rows], position_RW[rows], horizon_RW[rows], is_read_RW[rows])
    start_R, num_keys_R, num_entries_R, cached_R, slot_R, noise_key_R, step_R = per_row
    return StepPlan(
        token_RW=token_RW,
        position_RW=position_RW,
        horizon_RW=horizon_RW,
        is_read_RW=is_read_RW,
        start_R=start_R,
        num_keys_R=num_keys_R,
        num_entries_R=num_entries_R,
        cached_R=cached_R,
        slot_R=slot_R,
        noise_key_R=noise_key_R,
        step_R=step_R,
        request_R=request_R,
        commits=tuple(
            CommitSpan(index, step.decoding.slot, step.window.start, step.window.commit_length)
            for index, step in enumerate(steps)
            if step.window.commit_length
        ),
        sampling=sampling,
        is_block_causal=decode.window_attention == "block_causal",
    )


def _fill_per_row(step: RequestStep, per_row: Int) -> None:
    decoding, window = step.decoding, step.window
    num_keys_B = step.end_B - window.start
    values: tuple[Int | int, ...] = (
        window.start,
        num_keys_B,
        num_keys_B + len(step.shift_entry_of),
        max(window.cached, window.start),
        decoding.slot,
        decoding.noise_key,
        decoding.num_forwards,
    )
    for place, value in enumerate(values):
        per_row[place] = value


def _fill_window(
    step: RequestStep, decode: DecodeConfig, token_BW: Int, position_BW: Int, horizon_BW: Int, is_read_BW: Bool
) -> None:
    decoding, start = step.decoding, step.window.start
    width = step.window.end - start
    token_BW[:, :width] = decoding.token_S[start : step.window.end]
    position_BW[:, :width] = np.arange(start, step.window.end)
    is_read_BW[:, : width - 1] = step.is_masked_BW[:, 1:]
    if step.window.commit_length and decode.shift_row == "stale":
        is_read_BW[:, step.window.next_start - start - 1] = True  # the next step's carry
    if decode.window_attention == "full":
        horizon_BW[:, :width] = step.end_B[:, None]
    else:
        horizon_BW[:, :width] = _block_end(start, step.window.end, decoding.prompt_length, decode.block_size)
    for index, branch in enumerate(decoding.branches):
        if branch.position is not None:
            token_BW[index, branch.position - start] = branch.token
        if step.end_B[index] < step.window.end:
            padding = slice(int(step.end_B[index]) - start, width)
            token_BW[index, padding] = 0
            position_BW[index, padding] = 0
            horizon_BW[index, padding] = UNBOUNDED


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


def _fill_shift_entries(
    step: RequestStep, decode: DecodeConfig, token_BW: Int, position_BW: Int, horizon_BW: Int, is_read_BW: Bool
) -> None:
    decoding, start = step.decoding, step.window.start
    for block_start, place in step.shift_entry_of.items():
        before = block_start - 1
        for index, branch in enumerate(decoding.branches):
            end = int(step.end_B[index])
            entry = end - start + place
            token_BW[index, entry] = branch.token if branch.position == before else decoding.token_S[before]
            position_BW[index, entry] = before
            horizon_BW[index, entry] = end if decode.window_attention == "full" else block_start + decode.block_size
            if block_start < end:
                is_read_BW[index, entry] = step.is_masked_BW[index, block_start - start]
            if before >= start:
                is_read_BW[index, before - start] = False


def align(step: RequestStep, predictions: Predictions) -> Aligned:
    """Move every prediction to the position it speaks of (the shift of design 1.2, point 4)."""
    carry = step.decoding.carry
    return Aligned(
        _shift(step, predictions.token_RW, carry.token if carry else -1),
        _shift(step, predictions.probability_RW, carry.probability if carry else 0.0),
        _shift(step, predictions.confidence_RW, carry.confidence if carry else 0.0),
    )


def _shift(step: RequestStep, source_RW: npt.NDArray[Number], first: float) -> npt.NDArray[Number]:
    start, width = step.window.start, step.window.end - step.window.start
    source_BW = source_RW[step.first_row : step.last_row]
    aligned_BW = np.empty((len(step.end_B), width), dtype=source_BW.dtype)
    aligned_BW[:, 0] = first
    aligned_BW[:, 1:] = source_BW[:, : width - 1]
    for block_start, place in step.shift_entry_of.items():
        entry_B = step.end_B - start + place
        aligned_BW[:, block_start - start] = source_BW[np.arange(len(entry_B)), entry_B]
    return aligned_BW
