"""Revise a block as LLaDA2.2 does: fill its masks, replace its tokens, delete and insert, all from one pass's logits.

One rule beside filling and editing (`advancing`). After the writes one scan from left to right takes the edit tokens
out: one that deletes drops its position, one that inserts becomes a mask and what stood there. The block keeps
its length: what is pushed over its end is lost, and masks come in where it has become shorter. Masks that were there
when the block was opened are *first* ones; the mark moves with its token, and all others are new.

Published by FluxServe (`levenshtein.py`), SGLang (`joint_threshold_indel.py`) and the checkpoint's own code; `variant`
names whose. Columns are positions after the prompt, counted from the block's first such one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.compiled import compiled
from common.decoding.plan import Float, Int
from common.decoding.scheduling.strategies.blocks import count_masks, last_block
from common.decoding.scheduling.tables import GOES_ON, IS_SPENT, NOWHERE, RESTS, Request, Tables, is_end, request_of
from common.policies.settings import CHECKPOINT, FLUXSERVE, SGLANG

_SEEN, _WRITTEN, _SCANNED = range(3)
_MOST_ESCAPES = 5
_MODULUS, _FIRST_FACTOR, _SECOND_FACTOR = 2**31 - 1, 1000003, 69069


@compiled
def revise(tables: Tables, slot: int, values_3T: Float, fields_8R: Int, winner: int) -> int:
    """Revise the active block by what the winner predicts; returns how many masks were filled with a token of the text.

    Writes what the pass did into tables.drafts, one row a column, and into the state.
    """
    request = request_of(tables, slot)
    state, settings, block = request.state, request.settings, last_block(request)
    start = max(block.start, state.prompt_length)
    num_columns = block.end - start
    if not block.num_steps:
        _begin(request, start, block.end)
    num_first, num_new = _draft(tables, request, start, values_3T, fields_8R[0, winner] + start - state.window_start)
    if settings.variant == SGLANG:
        state.num_post += num_first == 0
        state.is_final = _is_spent_of_sglang(state, settings, block, num_first)
        if not state.is_final:
            _take_runners_up(tables, request, num_columns, values_3T)
    else:
        state.num_post = 0 if num_first else state.num_post + 1
    _choose_masks(tables, request, num_columns, num_first, num_new)
    _choose_edits(tables, request, num_columns)
    state.outcome, state.has_moved = GOES_ON, False
    if settings.variant == SGLANG and not _writes(tables, num_columns):
        state.outcome = RESTS
        return 0
    if state.is_final:
        _take_plain_tokens(tables, request, num_columns, values_3T)
    elif settings.variant == SGLANG:
        _escape_as_sglang(tables, request, num_columns, values_3T)
    else:
        _escape(tables, request, num_columns, values_3T)
    _remember(tables, request, num_columns)
    num_filled = _count_text(tables, request, num_columns)
    has_changed = _scan(tables, request, start, num_columns)
    block.num_masked = count_masks(request, start, block.end)
    block.num_steps += 1
    _look_for_end(tables, request, start)
    _settle(tables, request, num_columns, num_first + num_new > 0, has_changed)
    return num_filled


@compiled
def _begin(request: Request, start: int, end: int) -> None:
    state = request.state
    state.first_masks, state.num_post, state.repeats = 0, 0, False
    for position in range(start, end):
        request.is_first_P[position] = request.is_masked_P[position]
        state.first_masks += request.is_masked_P[position]


@compiled
def _draft(tables: Tables, request: Request, start: int, values_3T: Float, entry: int) -> tuple[int, int]:
    """Write what stands in each column and its most probable token. Returns how many masks are first ones, and new."""
    num_best, num_first, num_masked = (values_3T.shape[0] - 3) // 2, 0, 0
    for column in range(last_block(request).end - start):
        draft, position = tables.drafts[column], start + column
        draft.input, draft.entry = request.token_P[position], entry + column
        origin = request.origin_P[position]
        draft.input_step, draft.input_entry = origin.step, origin.entry
        draft.is_masked, draft.is_first = request.is_masked_P[position], request.is_first_P[position]
        draft.token = int(values_3T[3 if num_best else 0, draft.entry])
        draft.confidence = values_3T[3 + num_best if num_best else 1, draft.entry]
        draft.written, draft.writes, draft.is_runner_up, draft.has_escaped = draft.token, False, False, False
        num_masked += draft.is_masked
        num_first += draft.is_masked and draft.is_first
    return num_first, num_masked - num_first


@compiled
def _is_spent_of_sglang(state: Any, settings: Any, block: Any, num_first: int) -> bool:
    most = settings.max_post_edit_steps
    is_over = state.num_post >= most if most else num_first == 0
    return is_over or block.num_steps + 1 > settings.block_size + most


@compiled
def _take_runners_up(tables: Tables, request: Request, num_columns: int, values_3T: Float) -> None:
    """Where the mask token is the most probable at a first mask, take the best other token."""
    num_best, mask = (values_3T.shape[0] - 3) // 2, request.state.mask_token
    for column in range(num_columns):
        draft = tables.drafts[column]
        if draft.is_masked and draft.is_first and draft.token == mask:
            place = 0
            while place < num_best - 1 and values_3T[3 + place, draft.entry] == mask:
                place += 1
            draft.token = int(values_3T[3 + place, draft.entry])
            draft.confidence = values_3T[3 + num_best + place, draft.entry]
            draft.written, draft.is_runner_up = draft.token, True


@compiled
def _choose_masks(tables: Tables, request: Request, num_columns: int, num_first: int, num_new: int) -> None:
    """Mark which masks are filled, and decide whether the pass is the block's last."""
    state, settings, block = request.state, request.settings, last_block(request)
    is_sglang, most = settings.variant == SGLANG, settings.max_post_edit_steps
    if not is_sglang:
        state.is_final = (most > 0 and state.num_post >= most) or block.num_steps >= settings.max_block_steps - 1
    state.quota = NOWHERE
    if is_sglang and not state.is_final and num_first:
        state.quota = 1 + num_new
    elif not is_sglang and not state.is_final and num_first + num_new and block.num_steps < settings.steps:
        share, rest = state.first_masks // settings.steps, state.first_masks % settings.steps
        state.quota = share + (block.num_steps < rest) + num_new
    _fill_quota(tables, num_columns, state.quota, np.float32(settings.skip_threshold))
    if most == 0 and num_first and not state.is_final and not _leaves_first_masks(tables, num_columns):
        state.is_final, state.quota = True, NOWHERE
        _fill_quota(tables, num_columns, state.quota, np.float32(0))


@compiled
def _fill_quota(tables: Tables, num_columns: int, quota: int, threshold: float) -> None:
    """Mark all masks above the threshold if they are so many, else the most confident ones, of equal ones the earlier;
    without a quota all."""
    num_sure = 0
    for column in range(num_columns):
        draft = tables.drafts[column]
        draft.writes = draft.is_masked and (quota == NOWHERE or draft.confidence > threshold)
        num_sure += draft.writes
    if quota == NOWHERE or num_sure >= quota:
        return
    for column in range(num_columns):
        tables.drafts[column].writes = False
    for _ in range(quota):
        best = NOWHERE
        for column in range(num_columns):
            draft = tables.drafts[column]
            is_open = draft.is_masked and not draft.writes
            if is_open and (best == NOWHERE or draft.confidence > tables.drafts[best].confidence):
                best = column
        if best == NOWHERE:
            return
        tables.drafts[best].writes = True


@compiled
def _leaves_first_masks(tables: Tables, num_columns: int) -> bool:
    for column in range(num_columns):
        draft = tables.drafts[column]
        if draft.is_masked and draft.is_first and not draft.writes:
            return True
    return False


@compiled
def _choose_edits(tables: Tables, request: Request, num_columns: int) -> None:
    """Mark the filled positions at which another token is the most probable, and probable enough."""
    threshold = np.float32(request.settings.edit_threshold)
    for column in range(num_columns):
        draft = tables.drafts[column]
        if not draft.is_masked:
            draft.writes = draft.token != draft.input and draft.confidence > threshold


@compiled
def _writes(tables: Tables, num_columns: int) -> bool:
    for column in range(num_columns):  # noqa: SIM110 - numba takes no generator
        if tables.drafts[column].writes:
            return True
    return False


@compiled
def _take_plain_tokens(tables: Tables, request: Request, num_columns: int, values_3T: Float) -> None:
    """Write no token that edits in the last pass; with `sglang`, and where passes run out, no mask either."""
    state, settings = request.state, request.settings
    is_at_cap = settings.variant != SGLANG and last_block(request).num_steps >= settings.max_block_steps - 1
    keeps_mask = settings.variant != SGLANG and not is_at_cap
    for column in range(num_columns):
        draft = tables.drafts[column]
        if not draft.writes:
            continue
        for place in range((values_3T.shape[0] - 3) // 2):
            token = int(values_3T[3 + place, draft.entry])
            is_kept = keeps_mask or token != state.mask_token
            if token != state.delete_token and token != state.split_token and is_kept:
                draft.written = token
                break


@compiled
def _escape_as_sglang(tables: Tables, request: Request, num_columns: int, values_3T: Float) -> None:
    """Where the pass has seen a block that an earlier one has seen, give the least confident change the best token that
    was never written there."""
    state, settings, block = request.state, request.settings, last_block(request)
    if not _is_remembered(tables, request, _digest(tables, num_columns, _SEEN)):
        return
    column = _least_confident_change(tables, num_columns)
    if column == NOWHERE:
        return
    draft = tables.drafts[column]
    is_first_mask = draft.is_masked and draft.is_first
    place_in_block = settings.block_size - num_columns + column
    for place in range((values_3T.shape[0] - 3) // 2):
        token = int(values_3T[3 + place, draft.entry])
        was_tried = is_first_mask and token == state.mask_token
        for step in range(block.num_steps):
            was_tried |= tables.tried_S[state.first_memory + step * settings.block_size + place_in_block] == token
        if not was_tried:
            draft.written, draft.has_escaped = token, token != draft.token
            return


@compiled
def _escape(tables: Tables, request: Request, num_columns: int, values_3T: Float) -> None:
    """While the block would be one that was written before, change a change: of FluxServe the least confident one, of
    the checkpoint any; to its second-best token, or back to its best."""
    num_best = (values_3T.shape[0] - 3) // 2
    for trial in range(_MOST_ESCAPES):
        if not num_best or not _is_remembered(tables, request, _digest(tables, num_columns, _WRITTEN)):
            return
        if request.settings.variant == FLUXSERVE:
            column = _least_confident_change(tables, num_columns)
        else:
            column = _drawn_change(tables, request, num_columns, trial)
        if column == NOWHERE:
            return
        draft = tables.drafts[column]
        draft.written = int(values_3T[4, draft.entry]) if draft.written == draft.token else draft.token
        draft.has_escaped = draft.written != draft.token


@compiled
def _changes(draft: Any) -> bool:
    return draft.writes and draft.written != draft.input


@compiled
def _least_confident_change(tables: Tables, num_columns: int) -> int:
    found = NOWHERE
    for column in range(num_columns):
        draft = tables.drafts[column]
        if _changes(draft) and (found == NOWHERE or draft.confidence < tables.drafts[found].confidence):
            found = column
    return found


@compiled
def _drawn_change(tables: Tables, request: Request, num_columns: int, trial: int) -> int:
    """Return a change by chance, which the request's seed and the pass decide."""
    count = 0
    for column in range(num_columns):
        count += _changes(tables.drafts[column])
    if not count:
        return NOWHERE
    state = request.state
    key, number = int(state.noise_key) % _MODULUS, int(state.num_forwards + state.num_skipped)
    drawn = ((key * _FIRST_FACTOR + number) % _MODULUS * _SECOND_FACTOR + trial) % _MODULUS % count
    for column in range(num_columns):
        if _changes(tables.drafts[column]):
            if not drawn:
                return column
            drawn -= 1
    return NOWHERE


@compiled
def _digest(tables: Tables, num_columns: int, which: int) -> int:
    """Return 62 bits of the block as the pass saw it, as it is written, or after the scan."""
    first, second = 1, 1
    for column in range(num_columns):
        draft = tables.drafts[column]
        token = int(draft.input)
        if which == _SCANNED:
            token = int(draft.scanned)
        elif which == _WRITTEN and draft.writes:
            token = int(draft.written)
        first = (first * _FIRST_FACTOR + token + 1) % _MODULUS
        second = (second * _SECOND_FACTOR + token + 1) % _MODULUS
    return first * 2**31 + second


@compiled
def _is_remembered(tables: Tables, request: Request, digest: int) -> bool:
    first = request.state.first_memory
    for step in range(last_block(request).num_steps):  # noqa: SIM110 - numba takes no generator
        if tables.seen_S[first + step] == digest:
            return True
    return False


@compiled
def _remember(tables: Tables, request: Request, num_columns: int) -> None:
    """Note the block: of SGLang as the pass saw it, and what is written where; else as it is written."""
    state, settings, step = request.state, request.settings, last_block(request).num_steps
    is_sglang = settings.variant == SGLANG
    tables.seen_S[state.first_memory + step] = _digest(tables, num_columns, _SEEN if is_sglang else _WRITTEN)
    if is_sglang:
        first = state.first_memory + step * settings.block_size + settings.block_size - num_columns
        for column in range(num_columns):
            draft = tables.drafts[column]
            tables.tried_S[first + column] = draft.written if draft.writes else NOWHERE


@compiled
def _count_text(tables: Tables, request: Request, num_columns: int) -> int:
    """Return how many masks become text."""
    state, count = request.state, 0
    for column in range(num_columns):
        draft = tables.drafts[column]
        is_text = draft.written != state.delete_token and draft.written != state.split_token
        count += draft.writes and draft.is_masked and is_text and draft.written != state.mask_token
    return count


@compiled
def _scan(tables: Tables, request: Request, start: int, num_columns: int) -> bool:
    """Write the tokens, take the edit tokens out, note where masks are. A token takes its mark and its origin along.
    Returns whether the block is another than the pass saw."""
    state, count = request.state, 0
    for column in range(num_columns):
        draft = tables.drafts[column]
        deletes = draft.writes and draft.written == state.delete_token
        inserts = draft.writes and draft.written == state.split_token
        state.has_moved = state.has_moved or deletes or inserts
        if inserts:
            count = _put_mask(tables, state, num_columns, count)
        if not deletes:
            count = _put(tables, state, num_columns, count, column, draft.writes and not inserts)
    while count < num_columns:
        count = _put_mask(tables, state, num_columns, count)
    has_changed = False
    for column in range(num_columns):
        draft, position = tables.drafts[column], start + column
        has_changed = has_changed or draft.scanned != draft.input
        request.token_P[position], request.is_first_P[position] = draft.scanned, draft.scanned_is_first
        request.is_masked_P[position] = draft.scanned == state.mask_token
        origin = request.origin_P[position]
        origin.step, origin.entry = draft.scanned_step, draft.scanned_entry
    return has_changed


@compiled
def _put(tables: Tables, state: Any, num_columns: int, place: int, column: int, is_written: bool) -> int:
    """Write what is written in a column, or stood there, into the scanned block, unless it is past its end. Returns
    where the next token goes."""
    if place < num_columns:
        own, draft = tables.drafts[place], tables.drafts[column]
        own.scanned, own.scanned_is_first = draft.input, draft.is_first
        own.scanned_step, own.scanned_entry = draft.input_step, draft.input_entry
        if is_written:
            own.scanned, own.scanned_step, own.scanned_entry = draft.written, state.num_forwards + 1, draft.entry
    return place + 1


@compiled
def _put_mask(tables: Tables, state: Any, num_columns: int, place: int) -> int:
    """Put a new mask, as `_put` does a token."""
    if place < num_columns:
        own = tables.drafts[place]
        own.scanned, own.scanned_is_first, own.scanned_step, own.scanned_entry = state.mask_token, False, 0, 0
    return place + 1


@compiled
def _look_for_end(tables: Tables, request: Request, start: int) -> None:
    """Find out whether the block holds an end; those before it hold none."""
    request.state.has_eos = False
    for position in range(start, last_block(request).end):
        if not request.is_masked_P[position] and is_end(tables, request.state, request.token_P[position]):
            request.state.has_eos = True


@compiled
def _settle(tables: Tables, request: Request, num_columns: int, had_mask: bool, has_changed: bool) -> None:
    """Decide what becomes of the block, and whether the coming pass sees one that was seen before."""
    state, settings, block = request.state, request.settings, last_block(request)
    if settings.variant == SGLANG:
        if state.is_final:
            state.outcome = IS_SPENT if has_changed else RESTS
        state.repeats = _is_remembered(tables, request, _digest(tables, num_columns, _SCANNED))
        return
    if not had_mask and not has_changed:
        state.outcome = RESTS
    elif state.is_final and settings.variant == FLUXSERVE:
        state.outcome = IS_SPENT
    elif settings.variant == CHECKPOINT and not block.num_masked:
        is_over = state.is_final or state.num_post + 1 > settings.max_post_edit_steps
        state.outcome = RESTS if is_over else GOES_ON


@compiled
def without_edits(tables: Tables, slot: int, num_open: int) -> int:
    """Leave of the gathered masks those whose token is one of the text, so that filling it moves nothing; returns how
    many."""
    state, count = tables.states[slot], 0
    for place in range(num_open):
        position = tables.position_M[place]
        token = int(tables.winner_3W[0, position - state.window_start])
        if token != state.delete_token and token != state.split_token:
            tables.position_M[count], tables.probability_M[count] = position, tables.probability_M[place]
            tables.confidence_M[count] = tables.confidence_M[place]
            count += 1
    return count
