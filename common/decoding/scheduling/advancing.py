"""Make a step's winner the next anchor, with lookaheads: adopt the branch, fill what is sure, move blocks towards
the cache, spawn what to try, and see whether the request has ended.

`advance` does all of it for requests whose rules ship; `by_request` does the same step by step where a policy of
another package decides something or somebody looks.

Shapes: N requests in a step's order, T entries of all rows, M masks of a block, C masks that may be tried.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from common.compiled import compiled
from common.decoding.plan import Float, Int
from common.decoding.scheduling.planning import answer_end, carries
from common.decoding.scheduling.scoring import align_row, entry_of
from common.decoding.scheduling.strategies import fillable, final_end, is_done, open_block, settle
from common.decoding.scheduling.strategies.blocks import commits_next, filled_share, last_block
from common.decoding.scheduling.strategies.revising import revise, without_edits
from common.decoding.scheduling.tables import ACTIVE, NOWHERE, Parts, Request, Tables, is_end, request_of
from common.policies import lookahead_rules, spawn_rules
from common.policies.branch_scores import EXACT
from common.policies.fill_rules import AGREED, Masks, choose, is_sure
from common.policies.settings import LEVENSHTEIN, MULTI_BLOCK

GOES_ON, IS_DONE, IS_OUT_OF_STEPS, MAY_HAVE_STOPPED = range(4)


@compiled
def advance(
    places_N: Int, order_N: Int, parts: Parts, values_3T: Float, fields_8R: Int, winner_N: Int, ended_N: Int
) -> int:
    """Bring the requests at these places of the step from its predictions to the next one. ended_N: whether each has
    ended, as `end_of` says it. Returns how many may have."""
    tables, num_ended = Tables(*parts), 0
    for index in places_N:
        slot, winner = order_N[index], winner_N[index]
        taken = take(tables, slot, values_3T, fields_8R, winner)
        num_spans = spans_to_try(tables, slot, taken.num_spans)
        num_open = gather_open(tables, slot, num_spans)
        most = num_to_try(tables, slot, num_spans, taken.num_filled)
        rank_open(tables, slot, num_open, values_3T)
        spawn(tables, slot, num_open, most, values_3T)
        finish(tables, slot, winner, taken.num_tokens, taken.num_keys)
        ended_N[index] = end_of(tables, slot)
        num_ended += ended_N[index] != GOES_ON
    return num_ended


class Taken(NamedTuple):
    """What a winner brought. num_spans: that could be filled. num_filled: by the fill rule. num_tokens: these, the
    winner's own, and what began a block. num_keys: positions of its window."""

    num_spans: int
    num_filled: int
    num_edits: int
    num_tokens: int
    num_keys: int


@compiled
def take(tables: Tables, slot: int, values_3T: Float, fields_8R: Int, winner: int) -> Taken:
    """Make the winner the anchor, fill it, and move its blocks on."""
    num_keys = align_winner(tables, slot, values_3T, fields_8R, winner)
    num_adopted = adopt(tables, slot, winner)
    num_spans = find_spans(tables, slot)
    num_filled, num_edits = 0, 0
    if tables.settings[slot].strategy == LEVENSHTEIN:
        if num_spans:
            num_filled = revise(tables, slot, values_3T, fields_8R, winner)
    else:
        num_edits = find_edits(tables, slot, num_spans)
        may_wait = False
        for place in range(num_spans):
            num_masks = gather(tables, slot, place)
            if num_masks:
                choose_masks(tables, slot, place, num_masks, values_3T, fields_8R)
                num_filled += write_chosen(tables, slot, place, num_masks, may_wait)
                may_wait = may_wait or fills_alone(tables, slot, place)
        write_edits(tables, slot, num_edits)
    num_seeded = move_on(tables, slot, num_keys, num_filled + num_edits > 0)
    return Taken(num_spans, num_filled, num_edits, num_adopted + num_filled + num_seeded, num_keys)


@compiled
def align_winner(tables: Tables, slot: int, values_3T: Float, fields_8R: Int, winner: int) -> int:
    """Write what the winner predicts for each position of its window; returns how many positions that has."""
    request = request_of(tables, slot)
    request.state.winner_first, request.state.winner_keys = fields_8R[0, winner], fields_8R[2, winner]
    return align_row(tables, request, values_3T, fields_8R, winner, tables.winner_3W)


@compiled
def origin_of(tables: Tables, state: Any, position: int) -> tuple[int, int]:
    """Return pass and entry that the winner's prediction for this position comes from, as `scoring.align_row` lays them
    out."""
    entry = entry_of(tables, state, state.winner_first, state.winner_keys, position)
    return (state.carry_step, state.carry_entry) if entry == NOWHERE else (state.num_forwards + 1, entry)


@compiled
def adopt(tables: Tables, slot: int, winner: int) -> int:
    """Make the winner the anchor: the block it opened, its tokens, and the blocks that its filled shares activate.
    Returns how many tokens it brings along."""
    request = request_of(tables, slot)
    state, block_B, branch = request.state, request.block_B, winner - request.state.first_row
    own = tables.branches_K[slot, branch]
    if own.opens:
        open_block(request)
    for place in range(own.num_fills):
        fill = tables.fills_KF[slot, branch, place]
        write_token(tables, request, fill.position, fill.token)
        request.origin_P[fill.position].step, request.origin_P[fill.position].entry = fill.step, fill.entry
        block = state.num_blocks - 1
        while block_B[block].start > fill.position:
            block -= 1
        block_B[block].num_masked -= 1
    for place in range(state.num_blocks - 1, 0, -1):
        block = block_B[place]
        if block.status != ACTIVE:
            break
        if not block.is_activated:
            block.is_activated = filled_share(block_B[place - 1], 0) >= request.settings.decoded_token_threshold
    return int(own.num_fills)


@compiled
def write_token(tables: Tables, request: Request, position: int, token: int) -> None:
    """Write what the winner predicts at this position."""
    request.token_P[position], request.is_masked_P[position] = token, False
    origin = request.origin_P[position]
    origin.step, origin.entry = origin_of(tables, request.state, position)
    request.state.has_eos = request.state.has_eos or is_end(tables, request.state, token)


@compiled
def find_spans(tables: Tables, slot: int) -> int:
    """Write what the step may fill; returns how many spans."""
    request = request_of(tables, slot)
    count = fillable(request, tables.spans)
    if count and tables.spans[count - 1].end > request.state.widest_end:
        return 0  # the lookahead's token was the window's last mask
    return count


@compiled
def find_edits(tables: Tables, slot: int, num_spans: int) -> int:
    """Write filled positions of the first span to be replaced (LLaDA2.1): another token than the own one is the most
    probable, with more than `edit_threshold`. Counts the step, if the block has no mask. Returns how many."""
    request = request_of(tables, slot)
    state, settings, count = request.state, request.settings, 0
    if not num_spans or not settings.edits:
        return 0
    block = request.block_B[tables.spans[0].block]
    block.num_edit_steps += block.num_masked == 0
    if block.num_edit_steps > settings.max_post_edit_steps:
        return 0
    for position in range(max(block.start, state.prompt_length), block.end):
        if not request.is_masked_P[position]:
            column = position - state.window_start
            if tables.winner_3W[1, column] > np.float32(settings.edit_threshold):
                token = int(tables.winner_3W[0, column])
                if token == request.token_P[position]:
                    continue
                tables.edits[count].position, tables.edits[count].token = position, token
                count += 1
    return count


@compiled
def gather(tables: Tables, slot: int, place: int) -> int:
    """Write a span's masks and what the winner predicts there; returns how many."""
    span = tables.spans[place]
    if not span.num_masked:
        return 0
    return _gather(tables, slot, span.start, span.end)


@compiled
def _gather(tables: Tables, slot: int, start: int, end: int) -> int:
    request, count = request_of(tables, slot), 0
    is_masked_P, window_start = request.is_masked_P, request.state.window_start
    for position in range(start, end):
        if is_masked_P[position]:
            tables.position_M[count] = position
            tables.probability_M[count] = tables.winner_3W[1, position - window_start]
            tables.confidence_M[count] = tables.winner_3W[2, position - window_start]
            count += 1
    return count


@compiled
def choose_masks(tables: Tables, slot: int, place: int, num_masks: int, values_3T: Float, fields_8R: Int) -> None:
    """Mark which of the gathered masks the fill rule fills."""
    settings = tables.settings[slot]
    if settings.fill_rule == AGREED:
        _count_agreement(tables, slot, num_masks, values_3T, fields_8R)
    is_chosen_M = tables.is_chosen_M[:num_masks]
    is_chosen_M[:] = False
    count = quota(tables.states[slot].canvas_block, settings.fill_steps, tables.spans[place].num_steps)
    masks = Masks(
        tables.probability_M[:num_masks], tables.confidence_M[:num_masks], tables.agreed_M[:num_masks], tables.order_M,
        count,
    )  # fmt: skip
    choose(masks, settings, is_chosen_M)


@compiled
def quota(block_size: int, steps: int, step: int) -> int:
    """Return how many positions the given step of a block fills, if `steps` of them (0: one a position) fill all of it;
    1 at least."""
    num_steps = min(steps, block_size) if steps else block_size
    return block_size // num_steps + (step < block_size % num_steps)


@compiled
def _count_agreement(tables: Tables, slot: int, num_masks: int, values_3T: Float, fields_8R: Int) -> None:
    """Write the share of the branches that predict the winner's token at each gathered mask."""
    request = request_of(tables, slot)
    state, agreed_M = request.state, tables.agreed_M[:num_masks]
    agreed_M[:] = 0
    for branch in range(state.num_rows):
        num_keys = align_row(tables, request, values_3T, fields_8R, state.first_row + branch, tables.aligned_3W)
        for place in range(num_masks):
            column = tables.position_M[place] - state.window_start
            if column < num_keys and tables.aligned_3W[0, column] == tables.winner_3W[0, column]:
                agreed_M[place] += 1
    for place in range(num_masks):
        agreed_M[place] /= state.num_rows


@compiled
def write_chosen(tables: Tables, slot: int, place: int, num_masks: int, may_wait: bool) -> int:
    """Fill the chosen masks; in a block that need not fill any, those that pass the rule's threshold. Returns how
    many."""
    request, span, count = request_of(tables, slot), tables.spans[place], 0
    for each in range(num_masks):
        if not tables.is_chosen_M[each]:
            continue
        passes = is_sure(tables.probability_M[each], tables.confidence_M[each], request.settings)
        if not passes and (may_wait or not span.is_activated):
            continue
        position = tables.position_M[each]
        write_token(tables, request, position, int(tables.winner_3W[0, position - request.state.window_start]))
        request.state.num_forced += not passes
        count += 1
    span.num_masked -= count
    if span.block != NOWHERE:
        request.block_B[span.block].num_masked -= count
    return count


@compiled
def fills_alone(tables: Tables, slot: int, place: int) -> bool:
    """Return whether this block is the one that has to fill something: of several, `multi_block` has the first fully
    activated one do so alone."""
    return tables.settings[slot].strategy == MULTI_BLOCK and tables.spans[place].is_activated


@compiled
def write_edits(tables: Tables, slot: int, num_edits: int) -> None:
    """Replace tokens, and look anew for an end."""
    if not num_edits:
        return
    request = request_of(tables, slot)
    for place in range(num_edits):
        write_token(tables, request, tables.edits[place].position, tables.edits[place].token)
    request.state.has_eos = False
    for position in range(request.state.prompt_length, last_block(request).end):
        if not request.is_masked_P[position] and is_end(tables, request.state, request.token_P[position]):
            request.state.has_eos = True


@compiled
def move_on(tables: Tables, slot: int, num_keys: int, has_changed: bool) -> int:
    """Keep what predicts the next window's first position, begin a block whose first token the pass has predicted, and
    move finished blocks towards the cache. Returns the tokens that began a block."""
    request = request_of(tables, slot)
    state, num_seeded = request.state, 0
    if carries(request):
        column = state.next_start - state.window_start
        state.carry_token, state.carry_probability = tables.winner_3W[0, column], tables.winner_3W[1, column]
        state.carry_confidence = tables.winner_3W[2, column]
        state.carry_step, state.carry_entry = origin_of(tables, state, state.next_start)
    if state.predicts_next:
        open_block(request)
        block = last_block(request)
        block.num_masked -= 1
        write_token(tables, request, block.start, int(tables.winner_3W[0, num_keys - 1 + state.shift]))
        num_seeded = 1
    state.is_refreshed = not settle(request, has_changed)
    return num_seeded


@compiled
def spans_to_try(tables: Tables, slot: int, num_spans: int) -> int:
    """Leave the spans that lookaheads may go into; returns how many."""
    request, count = request_of(tables, slot), 0
    if request.settings.branch_score == EXACT and commits_next(request):  # no draft of such a pass is exact
        return 0
    if request.settings.strategy == LEVENSHTEIN:  # what moved was predicted elsewhere
        num_spans = 0 if request.state.has_moved else fillable(request, tables.spans)
    elif request.settings.max_block_steps:  # masks may be left where the next step fills none
        num_spans = fillable(request, tables.spans) if request.state.is_refreshed else 0
    for place in range(num_spans):
        if tables.spans[place].num_masked:
            tables.spans[count] = tables.spans[place]
            count += 1
    most = request.settings.spawn_blocks
    return min(count, most) if most else count


@compiled
def num_to_try(tables: Tables, slot: int, num_spans: int, num_filled: int) -> int:
    """Return how many lookaheads the next step tries at the most."""
    num_masked = 0
    for place in range(num_spans):
        num_masked += tables.spans[place].num_masked
    return lookahead_rules.count(num_filled, num_masked, tables.states[slot].score_variance, tables.settings[slot])


@compiled
def gather_open(tables: Tables, slot: int, num_spans: int) -> int:
    """Write the masks that lookaheads may fill; returns how many. What lies between spans is full."""
    if not num_spans or not tables.settings[slot].num_lookahead:
        return 0
    num_open = _gather(tables, slot, tables.spans[0].start, tables.spans[num_spans - 1].end)
    if tables.settings[slot].strategy == LEVENSHTEIN:
        num_open = without_edits(tables, slot, num_open)
    return spawn_rules.num_guarded(tables.confidence_M[:num_open], tables.settings[slot].spawn_entropy)


@compiled
def rank_open(tables: Tables, slot: int, num_open: int, values_3T: Float) -> None:
    """Write the rank that the spawn rule gives each of the gathered masks."""
    settings, first = tables.settings[slot], tables.states[slot].first_position
    mass_M, spread_M = tables.agreed_M[:num_open], tables.rank_M[:num_open]
    for place in range(num_open if settings.spawn_rule == spawn_rules.PIVOT else 0):
        mass_M[place], spread_M[place] = _kept(tables, slot, tables.position_M[place], values_3T)
    masks = spawn_rules.Open(
        tables.probability_M[:num_open], tables.confidence_M[:num_open], mass_M, spread_M,
        tables.draw_P[first : first + num_open], tables.order_M,
    )  # fmt: skip
    spawn_rules.rank(masks, settings, tables.rank_M[:num_open])


@compiled
def _kept(tables: Tables, slot: int, position: int, values_3T: Float) -> tuple[float, float]:
    """Return the sum of the probabilities of the position's most probable tokens, and the entropy of these; nothing of
    a position that an earlier pass predicts."""
    state, num_best, mass, spread = tables.states[slot], (values_3T.shape[0] - 3) // 2, 0.0, 0.0
    entry = entry_of(tables, state, state.winner_first, state.winner_keys, position)
    for each in range(min(num_best, tables.settings[slot].spawn_tokens) if entry != NOWHERE else 0):
        share = float(values_3T[3 + num_best + each, entry])
        mass += share
        spread -= share * np.log(max(share, 1e-30))
    return mass, spread


@compiled
def spawn(tables: Tables, slot: int, num_open: int, most: int, values_3T: Float) -> None:
    """Make the lookaheads at the masks of the highest ranks, of equal ones the earliest: the anchor and one more fill
    each; nested ones also those before; with several `tokens` a mask, one lookahead for each."""
    state, settings, num_made = tables.states[slot], tables.settings[slot], 0
    rank_M, chosen_K, is_pivot = tables.rank_M, tables.chosen_K, settings.spawn_rule == spawn_rules.PIVOT
    most_places = min(most, 1) if is_pivot else most
    for place in range(num_open if most else 0):
        if num_made == most_places and rank_M[place] <= rank_M[chosen_K[num_made - 1]]:
            continue
        if is_pivot and rank_M[place] < 0:
            continue
        num_made += num_made < most_places
        branch = num_made - 1
        while branch and rank_M[chosen_K[branch - 1]] < rank_M[place]:
            chosen_K[branch] = chosen_K[branch - 1]
            branch -= 1
        chosen_K[branch] = place
    if settings.spawn_tokens > 1:
        state.num_lookaheads = _spawn_tokens(tables, slot, num_made, most, values_3T)
        return
    for branch in range(num_made):
        own, first = tables.branches_K[slot, branch], 0 if settings.spawn_rule == spawn_rules.NESTED else branch
        own.num_fills, own.origin = branch - first + 1, settings.spawn_rule
        own.confidence = tables.confidence_M[chosen_K[branch]]
        for rank in range(first, branch + 1):
            fill, position = tables.fills_KF[slot, branch, rank - first], tables.position_M[chosen_K[rank]]
            fill.position, fill.token = position, int(tables.winner_3W[0, position - state.window_start])
            fill.step, fill.entry = origin_of(tables, state, position)
    state.num_lookaheads = num_made


@compiled
def _spawn_tokens(tables: Tables, slot: int, num_places: int, most: int, values_3T: Float) -> int:
    """Make a lookahead of each token that is probable enough at each of the chosen masks, the first mask's first;
    return how many. Only the best token is known at a mask that an earlier pass predicted."""
    state, settings, num_made = tables.states[slot], tables.settings[slot], 0
    num_best = (values_3T.shape[0] - 3) // 2
    for rank in range(num_places):
        place = tables.chosen_K[rank]
        column, (step, entry) = (
            tables.position_M[place] - state.window_start,
            origin_of(tables, state, tables.position_M[place]),
        )
        count = min(num_best, settings.spawn_tokens) if step == state.num_forwards + 1 else 1
        least = np.float32(settings.spawn_ratio) * tables.winner_3W[1, column]
        for each in range(count):
            token = tables.winner_3W[0, column] if not each else values_3T[3 + each, entry]
            if num_made == most or token < 0 or (each and values_3T[3 + num_best + each, entry] < least):
                break
            own, fill = tables.branches_K[slot, num_made], tables.fills_KF[slot, num_made, 0]
            own.num_fills, own.origin, own.confidence = 1, settings.spawn_rule, tables.confidence_M[place]
            fill.position, fill.token, fill.step, fill.entry = tables.position_M[place], int(token), step, entry
            num_made += 1
    return num_made


@compiled
def finish(tables: Tables, slot: int, winner: int, num_tokens: int, num_keys: int) -> None:
    """Count the step."""
    state = tables.states[slot]
    is_anchor = winner == state.first_row + state.num_rows - 1
    step = tables.step_B[state.first_step + state.num_forwards]
    step.tokens, step.rows, step.window = num_tokens, state.num_rows, num_keys
    step.winner = 0 if is_anchor else winner - state.first_row + 1
    state.num_forwards += 1
    state.num_wins += not is_anchor


@compiled
def end_of(tables: Tables, slot: int) -> int:
    """Return whether the request goes on, has nothing left to do, has had all its steps, or may have come to an end
    token or a stop string."""
    request = request_of(tables, slot)
    state = request.state
    if is_done(request):
        return IS_DONE
    if state.num_forwards >= state.most_steps:
        return IS_OUT_OF_STEPS
    if state.has_stops:
        return MAY_HAVE_STOPPED
    return MAY_HAVE_STOPPED if has_ended(tables, request) else GOES_ON


@compiled
def has_ended(tables: Tables, request: Request) -> bool:
    """Return whether everything up to an end token is filled and final."""
    state = request.state
    if not (state.has_eos and request.settings.stop_at_eos):
        return False
    end = answer_end(request)
    if final_end(request) != NOWHERE:
        end = min(end, final_end(request))
    for position in range(state.prompt_length, end):
        if request.is_masked_P[position]:
            return False
        if is_end(tables, state, request.token_P[position]):
            return True
    return False
