"""Score the branches of a step and pick the winners; and where a row's predictions lie.

Shapes: N requests in a step's order, R rows, T entries of all rows, W positions of a request's widest window.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.compiled import compiled
from common.decoding.plan import Bool, Float, Int, Score
from common.decoding.scheduling.tables import NOWHERE, Parts, Request, Tables, request_of
from common.policies.branch_scores import AGREEMENT, EXPECTED, HEDGED, MEAN, NO_MASK_LEFT, RIPPLE, Left, Tried, score_of
from common.policies.rule import PLUG_IN


@compiled
def align_row(tables: Tables, request: Request, values_3T: Float, fields_8R: Int, row: int, aligned_3W: Float) -> int:
    """Write token, probability and confidence that the row predicts for each position of its window, and for the one
    after it where the model predicts by the entry before. Returns how many positions the window has.

    Docs: docs/architecture.md, 'Positions own their predictors'.
    """
    state, first, num_keys = request.state, fields_8R[0, row], fields_8R[2, row]
    shift = state.shift
    for part in range(3):
        for column in range(num_keys):
            aligned_3W[part, column + shift] = values_3T[part, first + column]
    if shift:
        aligned_3W[0, 0], aligned_3W[1, 0] = state.carry_token, state.carry_probability
        aligned_3W[2, 0] = state.carry_confidence
    for place in range(state.num_shift_entries):
        column = tables.shift_positions_B[state.slot, place] - state.window_start
        for part in range(3):
            aligned_3W[part, column] = values_3T[part, first + num_keys + place]
    return num_keys


@compiled
def entry_of(tables: Tables, state: Any, first: int, num_keys: int, position: int) -> int:
    """Return the entry that predicts this position in a row with these numbers; NOWHERE: an earlier pass did."""
    for place in range(state.num_shift_entries - 1, -1, -1):
        if tables.shift_positions_B[state.slot, place] == position:
            return int(first + num_keys + place)
    column = position - state.window_start - state.shift
    return int(first + column) if column >= 0 else NOWHERE


@compiled
def select(order_N: Int, parts: Parts, values_3T: Float, fields_8R: Int, score_R: Score, winner_N: Int) -> None:
    """Score the rows of every request and write the winning ones."""
    tables = Tables(*parts)
    _score_rows(order_N, tables, values_3T, fields_8R, score_R)
    best_rows(order_N, tables, score_R, winner_N)


@compiled
def _score_rows(order_N: Int, tables: Tables, values_3T: Float, fields_8R: Int, score_R: Score) -> None:
    """Write C(B) of every row; 0 where `branch_score` is a plug-in, which the caller asks."""
    for slot in order_N:
        request = request_of(tables, slot)
        state, settings = request.state, request.settings
        if settings.branch_score == PLUG_IN:
            score_R[state.first_row : state.first_row + state.num_rows] = 0.0
            continue
        weight, num_lookaheads = settings.score_created, state.num_lookaheads
        looks_at_anchor = settings.branch_score in (EXPECTED, HEDGED, RIPPLE)
        is_agreed, looks_at_parents = True, settings.branch_score == AGREEMENT
        if (looks_at_anchor or looks_at_parents) and num_lookaheads:
            align_row(tables, request, values_3T, fields_8R, state.first_row + num_lookaheads, tables.winner_3W)
        for branch in range(state.num_rows):
            row, own = state.first_row + branch, tables.branches_K[slot, branch]
            created, num_fills = float(own.confidence), own.num_fills
            likely = _likely(tables, state, branch, values_3T, fields_8R) if looks_at_anchor else 1.0
            if settings.branch_score == MEAN and settings.score_bottom_share >= 1 and not state.num_shift_entries:
                score = _mean(tables, request, branch, values_3T[2], fields_8R[0, row])
                score_R[row] = weight * created + (1 - weight) * score if weight else score
                continue
            if looks_at_parents:
                is_agreed = _is_agreed(tables, state, branch, is_agreed)
            align_row(tables, request, values_3T, fields_8R, row, tables.aligned_3W)
            for each in range(num_lookaheads if settings.branch_score == RIPPLE else 0):
                _set_own_masks(tables, request, each, False)
            left = _left(tables, request, branch)
            for each in range(num_lookaheads if settings.branch_score == RIPPLE else 0):
                _set_own_masks(tables, request, each, True)
            draw, width = tables.score_draw_K[slot, branch], state.widest_end - state.window_start
            score = score_of(left, Tried(num_fills, likely, is_agreed, draw, width), settings)
            score_R[row] = weight * created + (1 - weight) * score if weight else score


@compiled
def _mean(tables: Tables, request: Request, branch: int, confidence_T: Any, first: int) -> float:
    """Return what `branch_scores.mean` does, from where the predictions lie: the published score is every step's."""
    state, count, total = request.state, 0, np.float64(0)
    is_masked_P, start = request.is_masked_P, max(state.window_start, state.prompt_length)
    before = first - state.shift - state.window_start
    _set_own_masks(tables, request, branch, False)
    if state.shift and start == state.window_start and is_masked_P[start]:
        total, count, start = np.float64(state.carry_confidence), 1, start + 1
    for position in range(start, tables.branches_K[state.slot, branch].masks_end):
        if is_masked_P[position]:
            total += confidence_T[before + position]
            count += 1
    _set_own_masks(tables, request, branch, True)
    return total / count if count else NO_MASK_LEFT


@compiled
def _left(tables: Tables, request: Request, branch: int) -> Left:
    """Return the branch's masks, and what it predicts there."""
    state, count, start = request.state, 0, request.state.window_start
    is_masked_P, probability_W, confidence_W = request.is_masked_P, tables.aligned_3W[1], tables.aligned_3W[2]
    _set_own_masks(tables, request, branch, False)
    for position in range(max(start, state.prompt_length), tables.branches_K[state.slot, branch].masks_end):
        if is_masked_P[position]:
            tables.position_M[count] = position - start
            tables.probability_M[count] = probability_W[position - start]
            tables.confidence_M[count] = confidence_W[position - start]
            count += 1
    _set_own_masks(tables, request, branch, True)
    return Left(tables.position_M[:count], tables.probability_M[:count], tables.confidence_M[:count], tables.rank_M)


@compiled
def _set_own_masks(tables: Tables, request: Request, branch: int, is_masked: bool) -> None:
    for place in range(tables.branches_K[request.state.slot, branch].num_fills):
        request.is_masked_P[tables.fills_KF[request.state.slot, branch, place].position] = is_masked


@compiled
def _likely(tables: Tables, state: Any, branch: int, values_3T: Float, fields_8R: Int) -> float:
    """Return the probability that the anchor, which is aligned, gives the branch's own tokens; 0 for one that is not
    the best by now, nor among the most probable ones where the pass tells these."""
    likely, anchor = 1.0, state.first_row + state.num_lookaheads
    for place in range(tables.branches_K[state.slot, branch].num_fills):
        fill, found = tables.fills_KF[state.slot, branch, place], 0.0
        column, num_best = fill.position - state.window_start, (values_3T.shape[0] - 3) // 2
        if tables.winner_3W[0, column] == fill.token:
            found = float(tables.winner_3W[1, column])
        elif num_best:
            entry = entry_of(tables, state, fields_8R[0, anchor], fields_8R[2, anchor], fill.position)
            for each in range(num_best if entry != NOWHERE else 0):
                if values_3T[3 + each, entry] == fill.token:
                    found = float(values_3T[3 + num_best + each, entry])
        likely *= found
    return likely


@compiled
def _is_agreed(tables: Tables, state: Any, branch: int, is_one_before: bool) -> bool:
    """Return whether each of the branch's own tokens is what the branch without it and its later ones predicts: of the
    last token, the anchor or the branch before, which are aligned. is_one_before: the answer of the branch before."""
    count = tables.branches_K[state.slot, branch].num_fills
    if not count:
        return True
    fill = tables.fills_KF[state.slot, branch, count - 1]
    column = fill.position - state.window_start
    if count == 1:
        return bool(tables.winner_3W[0, column] == fill.token)
    return bool(is_one_before and tables.aligned_3W[0, column] == fill.token)


@compiled
def best_rows(order_N: Int, tables: Tables, score_R: Score, winner_N: Int) -> None:
    """Write the winning row of every request, of equal scores the first; and how much its lookaheads' scores vary."""
    for index in range(len(order_N)):
        state = tables.states[order_N[index]]
        winner = state.first_row
        for row in range(winner + 1, state.first_row + state.num_rows):
            if score_R[row] > score_R[winner]:
                winner = row
        winner_N[index] = winner
        total, squares, count = 0.0, 0.0, state.num_lookaheads
        for row in range(state.first_row, state.first_row + count):
            total += score_R[row]
        for row in range(state.first_row, state.first_row + count):
            squares += (score_R[row] - total / count) ** 2
        state.score_variance = squares / count if count > 1 else np.inf


@compiled
def align(slot: int, tables: Tables, values_3T: Float, fields_8R: Int, values_3BW: Float, is_masked_BW: Bool) -> None:
    """Write what each branch of a request predicts at every position of its window, and where it has masks: what
    policies of other packages and observers look at. Zeros where a row ends before the widest."""
    request = request_of(tables, slot)
    state = request.state
    for branch in range(state.num_rows):
        num_keys = align_row(tables, request, values_3T, fields_8R, state.first_row + branch, tables.aligned_3W)
        end = tables.branches_K[slot, branch].masks_end
        for part in range(3):
            for column in range(values_3BW.shape[2]):
                values_3BW[part, branch, column] = tables.aligned_3W[part, column] if column < num_keys else 0.0
        _set_own_masks(tables, request, branch, False)
        for column in range(values_3BW.shape[2]):
            position = state.window_start + column
            is_masked_BW[branch, column] = position < end and request.is_masked_P[position]
        _set_own_masks(tables, request, branch, True)
