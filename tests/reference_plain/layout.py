"""Lay the branches of all requests out as the arrays of one forward pass (StepPlan), and read them back.

A row holds its window's positions first and its shift entries after them. In a model without shift, position p's own
entry predicts it. With shift the entry of p - 1 does: inside the window its left neighbour, at the window's first
position the carry, and with `shift_row: fresh` a shift entry, a second query of position p - 1 that sees what p sees
and provides no key.
"""

from __future__ import annotations

import numpy as np

from common.decoding.plan import Bool, CommitSpan, Float, Int, RowField, Sampling, StepPlan
from common.decoding.scheduling.rules import NO_TOKEN
from reference_plain.state import Aligned, PlainRequest, RequestStep


def plan_request(decoding: PlainRequest, first_row: int) -> RequestStep:
    """A request's rows, from first_row of the step on: the blocks that each branch opens, and what is computed."""
    blocks, strategy = decoding.blocks, decoding.strategy
    opens_block = _opens_block(decoding)
    window = strategy.window(blocks, decoding.is_refreshed)
    opened_end = new_end = blocks[-1].end  # a window may reach beyond it
    start = window.start
    ends = widths = (window.end - start,) * len(opens_block)
    if any(opens_block):
        own_end, new_end = window.end, strategy.new_block(blocks).end
        window = window._replace(end=max(own_end, new_end))
        ends = widths = tuple((window.end if opens else own_end) - start for opens in opens_block)
    if opened_end < window.end:
        ends = tuple((new_end if opens else opened_end) - start for opens in opens_block)
    column_of = _shift_columns(start, window.end, decoding)
    return RequestStep(decoding, first_row, window, opens_block, widths, ends, column_of)


def _opens_block(decoding: PlainRequest) -> list[bool]:
    """Whether each branch appends a block, by its own filled share of the last one, its lookahead token included."""
    blocks, opens_block = decoding.blocks, decoding.strategy.opens_block
    last = blocks[-1]
    if decoding.has_eos or not opens_block(blocks, last.share_with(1)):
        return [False] * len(decoding.branches)
    without, end_token_ids = opens_block(blocks, last.filled_share), decoding.rules.end_token_ids
    lookaheads = decoding.lookaheads
    return [*((without or at >= last.start) and token not in end_token_ids for at, token in lookaheads), without]


def _shift_columns(step_start: int, step_end: int, decoding: PlainRequest) -> dict[int, int]:
    """Starts of the blocks whose first position is predicted by a shift entry, and its column after the keys.

    In full attention only the first position after the cache needs one: every later predictor is in the window and
    sees all of it. Under block-causal attention no predictor sees the block after it, so every block's first
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


def lay_out(steps: list[RequestStep], sampling: Sampling) -> StepPlan:
    """Rows of every request, one after another."""
    entries_3T = np.concatenate([_entries_of(step) for step in steps], axis=1)
    is_read_T = np.concatenate([_is_read(step) for step in steps])
    fields_8R = np.concatenate([_row_fields_of(step) for step in steps], axis=1)
    fields_8R[RowField.FIRST] = np.cumsum([0, *fields_8R[RowField.NUM_ENTRIES][:-1]])
    num_rows_N = [len(step.widths) for step in steps]
    request_R = np.arange(len(steps)).repeat(num_rows_N)
    commits = []
    for index, step in enumerate(steps):
        window = step.window
        if window.commit_length:
            span = step.decoding.slot, window.start, window.commit_length
            commits.append(CommitSpan(index, *span, is_final=not window.is_tentative))
    # The same for all: SHARED_SETTINGS of the scheduler.
    commits_locally = steps[0].decoding.rules.decode.window_attention == "block_causal"
    commits_locally = commits_locally and not any(step.window.is_tentative for step in steps)
    sampling_3R = None
    if any(step.decoding.rules.decode.temperature > 0 for step in steps):
        of_request_N3 = np.array([step.decoding.rules.sampling for step in steps], dtype=np.float32)
        sampling_3R = of_request_N3.T.repeat(num_rows_N, axis=1)
    own = sampling.of_rows(sampling_3R)
    plan = StepPlan(entries_3T, is_read_T, fields_8R, request_R, tuple(commits), own, commits_locally, sampling_3R)
    return _with_changes(plan, steps) if sampling.is_special else plan


def _row_fields_of(step: RequestStep) -> Int:
    """StepPlan.row_fields_8R, but for where rows begin."""
    decoding, window = step.decoding, step.window
    fields_8B = np.zeros((len(RowField), len(step.widths)), dtype=np.int64)
    fields_8B[RowField.NUM_ENTRIES], fields_8B[RowField.NUM_KEYS] = step.lengths, step.widths
    fields_8B[RowField.START] = window.start
    fields_8B[RowField.CACHED] = max(window.cached, window.start)
    fields_8B[RowField.SLOT], fields_8B[RowField.NOISE_KEY] = decoding.slot, decoding.noise_key
    fields_8B[RowField.STEP] = decoding.num_forwards
    return fields_8B


def _columns_of(step: RequestStep, column_X: list[int]) -> Int:
    """Columns of every row's keys, followed by these."""
    return np.concatenate([np.array([*range(width), *column_X]) for width in step.widths])


def _shifts(step: RequestStep, offset: int = 0) -> list[int]:
    """Columns whose positions shift entries predict."""
    return [start - step.window.start + offset for start in step.shift_column_of]


def _entries_of(step: RequestStep) -> Int:
    """StepPlan.entries_3T: every row as the anchor has it, but for the lookaheads' own tokens."""
    decoding, start = step.decoding, step.window.start
    column_T = _columns_of(step, _shifts(step, -1))
    position_T = start + column_T
    if decoding.rules.decode.window_attention == "block_causal":
        size, num_before = decoding.rules.decode.block_size, start - decoding.strategy.origin
        seen_T = _columns_of(step, _shifts(step)) + num_before  # shift entries see what the predicted position does
        horizon_T = np.maximum(seen_T // size + 1, 0) * size - num_before + start
    else:
        horizon_T = start + np.array(step.widths).repeat(step.lengths)
    token_T = decoding.token_S.take(position_T, mode="clip")
    for first, behind_keys, (position, token) in zip(
        step.first_B, step.behind_keys_B, decoding.lookaheads, strict=False
    ):
        token_T[first + position - start] = token
        if position + 1 in step.shift_column_of:
            token_T[behind_keys + step.shift_column_of[position + 1]] = token
    return np.stack((token_T, position_T, horizon_T))


def _is_read(step: RequestStep) -> Bool:
    """StepPlan.is_read_T: the predictors of masks, but for those that lookaheads fill, and of what may be edited."""
    decoding, start, shift = step.decoding, step.window.start, step.decoding.rules.shift
    column_T = _columns_of(step, _shifts(step, -1))
    is_read_T = decoding.is_masked_S[shift:].take(start + column_T, mode="clip")  # the last position predicts none
    is_read_T &= column_T + shift < np.minimum(step.widths, step.ends).repeat(step.lengths)
    for column in filter(None, _shifts(step)):  # the shift entry predicts what this one did
        is_read_T[step.first_B + column - 1] = False
    for first, behind_keys, (position, _) in zip(step.first_B, step.behind_keys_B, decoding.lookaheads, strict=False):
        if position >= start + shift:
            is_read_T[first + position - start - shift] = False
        if position in step.shift_column_of:
            is_read_T[behind_keys + step.shift_column_of[position]] = False
    if decoding.rules.decode.edit_threshold is not None and not shift:
        is_read_T |= _is_edited(step).take(column_T)
    if step.reads_carry:
        is_read_T[step.first_B + step.window.next_start - start - 1] = True
    if step.window.predicts_next:
        is_read_T[step.behind_keys_B - 1] = True
    return is_read_T


def _is_edited(step: RequestStep) -> Bool:
    """[W] positions whose filled tokens the step may replace: of active blocks, after the prompt."""
    is_edited_W = np.zeros(step.window.end - step.window.start, dtype=np.bool_)
    for block in step.decoding.strategy.fillable(step.decoding.blocks, step.decoding.is_refreshed):
        first = max(block.start, step.decoding.prompt_length)
        is_edited_W[first - step.window.start : block.end - step.window.start] = True
    return is_edited_W


def _with_changes(plan: StepPlan, steps: list[RequestStep]) -> StepPlan:
    """The same plan with what the pass changes about its logits: `changes_2T` and, under guidance, a second row after
    all rows for each, whose prompt is masked."""
    sampling, num_tokens, num_rows = plan.sampling, plan.num_tokens, plan.num_rows
    decoding_R = [step.decoding for step in steps for _ in step.widths]
    decoding_T = [one for one, count in zip(decoding_R, plan.num_entries_R, strict=True) for _ in range(count)]
    token_T, position_T, own_T = plan.token_T.tolist(), plan.position_T.tolist(), list(range(num_tokens))
    lowered_T = [NO_TOKEN] * num_tokens
    if sampling.penalty_lambda:
        for entry in own_T[1:]:
            if position_T[entry] % decoding_T[entry].rules.block_size:
                lowered_T[entry] = token_T[entry - 1]
    if not sampling.cfg_scale:
        return plan._replace(changes_2T=np.array([own_T, lowered_T]))
    entries_3T, row_fields_8R = np.tile(plan.entries_3T, 2), np.tile(plan.row_fields_8R, 2)
    for entry, decoding in enumerate(decoding_T):
        if position_T[entry] < decoding.prompt_length:
            entries_3T[0, num_tokens + entry] = sampling.mask_token_id
    row_fields_8R[RowField.FIRST, num_rows:] += num_tokens
    return plan._replace(
        entries_3T=entries_3T,
        is_read_T=np.array([*plan.is_read_T, *[False] * num_tokens]),
        row_fields_8R=row_fields_8R,
        request_R=np.tile(plan.request_R, 2),
        num_guiding_rows=num_rows,
        sampling_3R=None if plan.sampling_3R is None else np.tile(plan.sampling_3R, 2),
        changes_2T=np.array([[num_tokens + entry for entry in own_T] * 2, lowered_T * 2]),
    )


def masks_of(step: RequestStep) -> Bool:
    """[B, W]: every branch's masks among the blocks that it has opened."""
    start, end = step.window.start, step.window.end
    is_masked_BW = np.tile(step.decoding.is_masked_S[start:end], (len(step.widths), 1))
    for row, (position, _) in enumerate(step.decoding.lookaheads):
        is_masked_BW[row, position - start] = False
    for row, own_end in enumerate(step.ends):
        is_masked_BW[row, own_end:] = False
    return is_masked_BW


def align(step: RequestStep, values_3T: Float) -> Aligned:
    """Move every prediction to the position it speaks of (docs/architecture.md, 'Positions own their predictors').
    values_3T: of the request's entries."""
    shift, start = step.decoding.rules.shift, step.window.start
    values_3BW = np.zeros((3, len(step.widths), step.window.end - start), np.float32)
    if shift and start not in step.shift_column_of:
        values_3BW[:, :, 0] = step.decoding.carry_3[:, None]
    for row, (first, width) in enumerate(zip(step.first_B, step.widths, strict=True)):
        values_3BW[:, row, shift:width] = values_3T[:, first : first + width - shift]
    for block_start, column in step.shift_column_of.items():
        values_3BW[:, :, block_start - start] = values_3T[:, step.behind_keys_B + column]
    return Aligned(values_3BW, values_3T[:, step.behind_keys_B - 1] if step.window.predicts_next else None)
