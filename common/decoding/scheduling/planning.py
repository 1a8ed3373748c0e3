"""Plan a step: the blocks that each branch opens, and the rows of one forward pass.

A row holds its window's positions first and its shift entries after them. In a model without shift, position p's own
entry predicts it. With shift the entry of p - 1 does: inside the window its left neighbour, at the window's first
position the carry, and with `shift_row: fresh` a shift entry, a second query of position p - 1 that sees what p sees
and provides no key.

Shapes: N requests in a step's order, R rows, T entries of all rows.
"""

from __future__ import annotations

from typing import Any

from common.compiled import compiled
from common.decoding.plan import Bool, Int, Int32
from common.decoding.scheduling.strategies import begin, fillable, final_end, opens, window
from common.decoding.scheduling.strategies.blocks import last_block, next_end, num_prompt_positions
from common.decoding.scheduling.tables import NOWHERE, Parts, Request, Tables, is_end, request_of


@compiled
def begin_request(tables: Tables, slot: int, num_cached: int) -> None:
    """Make the first blocks of a request. num_cached: positions of the prompt whose KV is there already."""
    begin(request_of(tables, slot), num_cached)


@compiled
def _opens(tables: Tables, request: Request, branch: int) -> bool:
    """Return whether the branch appends a block, by its own filled share of the last one."""
    state, num_more, start = request.state, 0, last_block(request).start
    if state.has_eos:
        return False
    for place in range(tables.branches_K[state.slot, branch].num_fills):
        fill = tables.fills_KF[state.slot, branch, place]
        if is_end(tables, state, fill.token):
            return False
        num_more += fill.position >= start
    return opens(request, num_more)


@compiled
def row_ends(tables: Tables, request: Request, branch: int) -> tuple[bool, int, int]:
    """Return whether the branch opens a block in the coming step, whose window is known, and where its row and its
    masks end."""
    window_end, masks_end = request.state.window_end, last_block(request).end
    if not _opens(tables, request, branch):
        return False, window_end, min(masks_end, window_end)
    masks_end = next_end(request)
    return True, max(window_end, masks_end), masks_end


@compiled
def plan(
    order_N: Int, parts: Parts, entries_3T: Int32, is_read_T: Bool, fields_8R: Int, request_R: Int, commits_N5: Int
) -> tuple[int, int, int, bool]:
    """Decide what each request computes and write StepPlan's arrays, if they have room for it.

    Returns rows and entries of all; commits, NOWHERE if there was no room; and StepPlan.commits_locally.
    """
    tables, num_commits = Tables(*parts), NOWHERE
    num_rows, num_entries, is_tentative = _measure(order_N, tables)
    if num_rows <= len(request_R) and num_entries <= len(is_read_T):
        num_commits = _write_rows(order_N, tables, entries_3T, is_read_T, fields_8R, request_R, commits_N5)
    is_causal = tables.settings[order_N[0]].is_causal  # the same for all: SHARED_SETTINGS of the scheduler
    return num_rows, num_entries, num_commits, is_causal and not is_tentative


@compiled
def _measure(order_N: Int, tables: Tables) -> tuple[int, int, bool]:
    """Decide what each request computes. Returns rows and entries of all, and whether some commit is tentative."""
    num_rows, num_entries, is_tentative = 0, 0, False
    for slot in order_N:
        request = request_of(tables, slot)
        state = request.state
        window(request)
        state.first_row, state.num_rows = num_rows, state.num_lookaheads + 1
        state.widest_end = state.window_end
        before, anchor = num_entries, tables.branches_K[slot, state.num_lookaheads]
        anchor.num_fills, anchor.confidence = 0, 1.0
        for place in range(state.num_rows):
            branch = tables.branches_K[slot, place]
            branch.opens, branch.row_end, branch.masks_end = row_ends(tables, request, place)
            state.widest_end = max(state.widest_end, branch.row_end)
            num_entries += branch.row_end - state.window_start
        state.num_shift_entries = 0
        if request.settings.is_fresh and state.shift and state.keeps_carry:
            _find_shift_entries(tables, request)
            num_entries += state.num_rows * state.num_shift_entries
        state.num_entries = num_entries - before
        num_rows += state.num_rows
        is_tentative = is_tentative or state.is_tentative
    return num_rows, num_entries, is_tentative


@compiled
def _find_shift_entries(tables: Tables, request: Request) -> None:
    """Note the first positions of blocks that a shift entry predicts.

    In full attention only the first position after the cache needs one: every later predictor is in the window and sees
    all of it. Under block-causal attention no predictor sees the block after its own, so every block's first position
    does.
    """
    state, count = request.state, 0
    if not request.settings.is_causal:
        if state.window_start and request.is_masked_P[state.window_start]:
            tables.shift_positions_B[state.slot, 0] = state.window_start
            count = 1
    else:
        for start in range(state.prompt_length, state.widest_end, request.settings.block_size):
            if start >= state.window_start and request.is_masked_P[start]:
                tables.shift_positions_B[state.slot, count] = start
                count += 1
    state.num_shift_entries = count


@compiled
def _write_rows(
    order_N: Int, tables: Tables, entries_3T: Int32, is_read_T: Bool, fields_8R: Int, request_R: Int, commits_N5: Int
) -> int:
    """Write StepPlan's arrays and its commits (request, slot, start, length, final or not); returns how many commits.

    Every row is as the anchor has it, but for its own tokens, which nothing need predict.
    """
    row, first, num_commits = 0, 0, 0
    for index in range(len(order_N)):
        request = request_of(tables, order_N[index])
        state = request.state
        if state.commit_length:
            commits_N5[num_commits, 0], commits_N5[num_commits, 1] = index, state.slot
            commits_N5[num_commits, 2], commits_N5[num_commits, 3] = state.window_start, state.commit_length
            commits_N5[num_commits, 4] = not state.is_tentative
            num_commits += 1
        for branch in range(state.num_rows):
            num_keys = tables.branches_K[state.slot, branch].row_end - state.window_start
            num_entries = num_keys + state.num_shift_entries
            request_R[row] = index
            fields_8R[0, row], fields_8R[1, row], fields_8R[2, row] = first, num_entries, num_keys
            fields_8R[3, row], fields_8R[4, row] = state.window_start, state.window_cached
            fields_8R[5, row], fields_8R[6, row] = state.slot, state.noise_key
            fields_8R[7, row] = state.num_forwards + state.num_skipped
            _write_row(tables, request, branch, num_keys, entries_3T[:, first : first + num_entries], is_read_T, first)
            row, first = row + 1, first + num_entries
    return num_commits


@compiled
def _write_row(
    tables: Tables, request: Request, branch: int, num_keys: int, entries_3E: Int32, is_read_T: Bool, first: int
) -> None:
    state, settings = request.state, request.settings
    start, shift, end = state.window_start, state.shift, state.window_start + num_keys
    last_mask = tables.branches_K[state.slot, branch].masks_end
    token_W, is_masked_W = request.token_P[start:end], request.is_masked_P[start + shift : last_mask]
    own_W, position_W, horizon_W, is_read_W = entries_3E[0], entries_3E[1], entries_3E[2], is_read_T[first:]
    for column in range(num_keys):  # one array at a time: such loops are computed many numbers at once
        own_W[column] = token_W[column]
    for column in range(num_keys):
        position_W[column] = start + column
    if settings.is_causal:
        for column in range(num_keys):
            horizon_W[column] = _horizon(state, settings, start + column, end)
    else:
        for column in range(num_keys):
            horizon_W[column] = end
    num_masks = max(last_mask - start - shift, 0)
    for column in range(num_masks):
        is_read_W[column] = is_masked_W[column]
    for column in range(num_masks, num_keys):
        is_read_W[column] = False
    for place in range(state.num_shift_entries):
        position = tables.shift_positions_B[state.slot, place]
        column = num_keys + place
        entries_3E[0, column], entries_3E[1, column] = request.token_P[position - 1], position - 1
        entries_3E[2, column] = _horizon(state, settings, position, end)
        is_read_T[first + column] = position < last_mask and request.is_masked_P[position]
        if position > start and position <= end:  # the shift entry predicts what this one did
            is_read_T[first + position - 1 - start] = False
    _write_own_tokens(tables, state, branch, num_keys, entries_3E, is_read_T, first)
    if settings.edits and not shift:
        for place in range(fillable(request, tables.spans)):
            span = tables.spans[place]
            for position in range(max(span.start, state.prompt_length), min(span.end, end)):
                is_read_T[first + position - start] = True
    if carries(request):
        is_read_T[first + state.next_start - 1 - start] = True
    if state.predicts_next:
        is_read_T[first + num_keys - 1] = True


@compiled
def _write_own_tokens(
    tables: Tables, state: Any, branch: int, num_keys: int, entries_3E: Int32, is_read_T: Bool, first: int
) -> None:
    start = state.window_start
    for place in range(tables.branches_K[state.slot, branch].num_fills):
        fill = tables.fills_KF[state.slot, branch, place]
        entries_3E[0, fill.position - start] = fill.token
        if fill.position >= start + state.shift:
            is_read_T[first + fill.position - state.shift - start] = False
        for each in range(state.num_shift_entries):
            if tables.shift_positions_B[state.slot, each] == fill.position + 1:
                entries_3E[0, num_keys + each] = fill.token
            if tables.shift_positions_B[state.slot, each] == fill.position:
                is_read_T[first + num_keys + each] = False


@compiled
def _horizon(state: Any, settings: Any, position: int, row_end: int) -> int:
    """Return below which position keys are seen by what predicts there."""
    if not settings.is_causal:
        return row_end
    return max((position - state.origin) // settings.block_size + 1, 0) * settings.block_size + state.origin


@compiled
def carries(request: Request) -> bool:
    """Return whether the step predicts the first position after what it commits, for the next step."""
    state = request.state
    return state.commit_length > 0 and state.keeps_carry and not request.settings.is_fresh and state.shift > 0


@compiled
def num_prompt_tokens(order_N: Int, tables: Tables) -> int:
    """Return the prompt positions of the coming step, of requests that have begun."""
    count = 0
    for slot in order_N:
        if tables.states[slot].num_forwards:
            count += num_prompt_positions(request_of(tables, slot))
    return count


@compiled
def final_counts(order_N: Int, tables: Tables, count_N: Int) -> None:
    """Write how many tokens of each answer can no longer change and have not been told of: no mask lies before them,
    and no end."""
    for index in range(len(order_N)):
        request = request_of(tables, order_N[index])
        state = request.state
        begin, end = state.prompt_length + state.num_given, answer_end(request)
        if final_end(request) != NOWHERE:
            end = min(end, final_end(request))
        position = begin
        if state.num_given and is_end(tables, state, request.token_P[begin - 1]):
            end = begin
        while position < end and not request.is_masked_P[position]:
            position += 1
            if is_end(tables, state, request.token_P[position - 1]):
                break
        count_N[index] = max(position - begin, 0)


@compiled
def answer_end(request: Request) -> int:
    """Return where that ends what has been opened and asked for."""
    state = request.state
    asked = state.prompt_length + request.settings.max_new_tokens
    return max(state.prompt_length, min(last_block(request).end, asked))


@compiled
def ends_of_answer(tables: Tables, slot: int) -> tuple[int, int]:
    """Return where that ends what has been opened and asked for, and below which position filled ones can no longer
    change (NOWHERE: no filled position can)."""
    request = request_of(tables, slot)
    return answer_end(request), final_end(request)
