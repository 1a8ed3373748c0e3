"""Accept drafts without a loss: find the branch that decoding without lookaheads would come to, or comes near to.

FreeDave (arXiv 2510.00294; github.com/cychomatica/FreeDave, generation/core.py): from the branch that is held, first
the anchor, the pass says what the next step would fill. If some branch is that state, the same pass says what the step
after it fills; that branch is held, and so on.

`exact`: the branch has all of those tokens and no other, and its row is the one that the next pass would compute: the
same window beside the same cached keys, and nothing to commit. `subset`: all of its tokens are among them.

Shapes: N requests in a step's order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from common.compiled import compiled, records
from common.decoding.plan import Float, Int, Score
from common.decoding.scheduling.advancing import Taken, has_ended, take
from common.decoding.scheduling.planning import row_ends
from common.decoding.scheduling.strategies import is_done, window
from common.decoding.scheduling.tables import BLOCK, NOWHERE, ORIGIN, STATE, Parts, Tables, request_of
from common.policies.branch_scores import EXACT, SUBSET


class Kept(NamedTuple):
    """A request's state, kept while a step is tried."""

    state_1: Any
    token_P: Any
    is_masked_P: Any
    origin_P: Any
    block_B: Any


def hold(order_N: Int, parts: Parts, values_3T: Float, fields_8R: Int, score_R: Score, winner_N: Int) -> None:
    """Where the branch score asks for it, make the last branch that is accepted the winner, of the highest score."""
    tables = Tables(*parts)
    kept = Kept(
        records(np.zeros(1, STATE)), np.empty_like(tables.token_P), np.empty_like(tables.is_masked_P),
        records(np.empty(len(tables.origin_P), ORIGIN)), records(np.empty(len(tables.block_B), BLOCK)),
    )  # fmt: skip
    _hold(order_N, parts, values_3T, fields_8R, score_R, winner_N, tuple(kept))


@compiled
def _hold(
    order_N: Int, parts: Parts, values_3T: Float, fields_8R: Int, score_R: Score, winner_N: Int, kept_parts: Any
) -> None:
    tables, kept = Tables(*parts), Kept(*kept_parts)
    for index in range(len(order_N)):
        slot = order_N[index]
        state, rule = tables.states[slot], tables.settings[slot].branch_score
        if rule not in (EXACT, SUBSET):
            continue
        first_row, num_lookaheads = state.first_row, state.num_lookaheads
        held, found = NOWHERE, num_lookaheads  # branches; the anchor comes last
        _keep(tables, slot, kept)
        while found != NOWHERE:
            held, least = found, found + 1 if held != NOWHERE else 0
            taken = take(tables, slot, values_3T, fields_8R, first_row + held)
            found = _next(tables, slot, taken, fields_8R, first_row, least)
            _put_back(tables, slot, kept)
        winner_N[index] = first_row + held
        score_R[first_row + held] = 2.0


@compiled
def _keep(tables: Tables, slot: int, kept: Kept) -> None:
    request = request_of(tables, slot)
    kept.state_1[0] = tables.states[slot]
    for position in range(len(request.token_P)):
        kept.token_P[position], kept.is_masked_P[position] = request.token_P[position], request.is_masked_P[position]
        kept.origin_P[position] = request.origin_P[position]
    for place in range(len(request.block_B)):
        kept.block_B[place] = request.block_B[place]


@compiled
def _put_back(tables: Tables, slot: int, kept: Kept) -> None:
    request = request_of(tables, slot)
    for position in range(len(request.token_P)):
        request.token_P[position], request.is_masked_P[position] = kept.token_P[position], kept.is_masked_P[position]
        request.origin_P[position] = kept.origin_P[position]
    for place in range(len(request.block_B)):
        request.block_B[place] = kept.block_B[place]
    tables.states[slot] = kept.state_1[0]


@compiled
def _next(tables: Tables, slot: int, taken: Taken, fields_8R: Int, first_row: int, least: int) -> int:
    """Return the branch of most tokens, from `least` on, that the state after a step accepts; NOWHERE: none."""
    request = request_of(tables, slot)
    state, is_exact = request.state, request.settings.branch_score == EXACT
    if is_exact and (taken.num_edits or is_done(request) or has_ended(tables, request)):
        return NOWHERE
    masks_end = 0
    if is_exact:
        window(request)
        _, row_end, masks_end = row_ends(tables, request, state.num_lookaheads)
        if state.commit_length or state.predicts_next or state.is_tentative:
            return NOWHERE
    for branch in range(state.num_lookaheads - 1, least - 1, -1):
        own, row = tables.branches_K[slot, branch], first_row + branch
        if not _is_part(tables, slot, branch):
            continue
        if not is_exact:
            return branch
        has_window = fields_8R[3, row] == state.window_start and fields_8R[4, row] == state.window_cached
        has_window = has_window and own.row_end == row_end and own.masks_end == masks_end
        if has_window and own.num_fills == taken.num_tokens:
            return branch
    return NOWHERE


@compiled
def _is_part(tables: Tables, slot: int, branch: int) -> bool:
    """Return whether all of the branch's own tokens have been filled in."""
    request = request_of(tables, slot)
    for place in range(tables.branches_K[slot, branch].num_fills):
        fill = tables.fills_KF[slot, branch, place]
        if request.is_masked_P[fill.position] or request.token_P[fill.position] != fill.token:
            return False
    return True
