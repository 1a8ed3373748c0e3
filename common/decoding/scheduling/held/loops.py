"""What holding an answer to a format comes to, position by position.

Shapes: W positions of the part that is solved, Q states, C classes, X entries that statistics are given of, T all.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import Any, NamedTuple

import numpy as np

from common.compiled import compiled
from common.constraints import MASK, NEVER, Graph
from common.decoding.plan import Bool, ClassField, Float, Int, Score
from common.decoding.scheduling.held.joint import best_path, drawn_path, find_alive, find_possible
from common.decoding.scheduling.tables import Parts, Tables, request_of

TOKEN, LOGIT, WEIGHT = int(ClassField.TOKEN), int(ClassField.LOGIT), int(ClassField.WEIGHT)
MASS, MEAN = int(ClassField.MASS), int(ClassField.MEAN)


class Part(NamedTuple):
    """The positions from `begin` on that are solved. state: before them. reach: up to where it was asked for. class_W:
    MASK for masks. is_alive_WQ, is_possible_WC: as `look` writes them."""

    begin: int
    width: int
    state: int
    reach: int
    class_W: Any
    is_alive_WQ: Bool
    is_possible_WC: Bool


class Given(NamedTuple):
    """Statistics of the classes at these entries of a pass, and at the first position after the cache: empty where none
    are kept."""

    entry_X: Int
    values_XC5: Float
    carry_1C5: Float


class Workspace(NamedTuple):
    """Memory that loops write into, for parts up to a width. path_W: the solution's classes."""

    weight_WC: Score
    highest_W1: Score
    score_2Q: Score
    state_2Q: Any
    best_S: Score
    place_S: Any
    back_WQ: Any
    rest_WQ: Score
    path_W: Any


@compiled
def find_part(
    parts: Parts, slot: int, graph: Graph, start: int, begin: int, end: int, reach: int, branch: int, class_P: Any
) -> tuple[int, int, int]:
    """Write the classes of the positions [begin, end), MASK for masks, with the branch's fills (NEVER: none). Returns
    the first mask, counted from begin; how many positions from there on are predicted, up to `reach`, or filled; and
    the state before them, NEVER where there is none."""
    tables = Tables(*parts)
    request = request_of(tables, slot)
    count = min(end, request.state.num_positions) - begin
    for place in range(count):
        masked = request.is_masked_P[begin + place]
        class_P[place] = MASK if masked else graph.class_V[request.token_P[begin + place]]
    if branch != NEVER:
        for index in range(tables.branches_K[slot, branch].num_fills):
            fill = tables.fills_KF[slot, branch, index]
            if begin <= fill.position < begin + count:
                class_P[fill.position - begin] = graph.class_V[fill.token]
    first, stop, state = count, 0, start
    for place in range(count):
        if class_P[place] == MASK:
            first = min(first, place)
        else:
            stop = place + 1
    for place in range(first):
        if state != NEVER:
            state = graph.next_QC[state, class_P[place]]
    return first, min(max(reach - begin, stop, first), count) - first, state


@compiled
def look(
    graph: Graph, state: int, class_W: Any, width: int, num_left: int, is_alive_WQ: Bool, is_possible_WC: Bool
) -> bool:
    """Write what each mask may become. Returns False where there is no way on."""
    if state == NEVER or not find_alive(graph, class_W, width, state, num_left, is_alive_WQ):
        return False
    for place in range(width):
        if class_W[place] == MASK:
            find_possible(graph, is_alive_WQ, place, is_possible_WC[place])
    return True


@compiled
def find_entries(parts: Parts, slot: int, branch: int, fields_8R: Int, entry_N: Int) -> int:
    """Write the entry that predicts each position of the row's window, and the one after it where a model predicts by
    the entry before, as `scoring.align_row` has them; NEVER: the carry does. Returns how many."""
    tables = Tables(*parts)
    state = tables.states[slot]
    row = state.first_row + branch
    first, num_keys, shift = fields_8R[0, row], fields_8R[2, row], state.shift
    for column in range(num_keys + shift):
        entry_N[column] = NEVER if column < shift else first + column - shift
    for place in range(state.num_shift_entries):
        column = tables.shift_positions_B[slot, place] - state.window_start
        if column < num_keys + shift:  # not of a block that another row has opened
            entry_N[column] = first + num_keys + place
    return int(num_keys + shift)


@compiled
def stands(
    token_P: Int, is_masked_P: Bool, begin: int, end: int, graph: Graph, start: int, is_final_Q: Bool, end_class: int
) -> bool:
    """Return whether the answer [begin, end) stands: its canvas is full, or nothing but an end token may follow what it
    has."""
    state, place = start, begin
    while place < min(end, len(token_P)) and not is_masked_P[place]:
        state = graph.next_QC[state, graph.class_V[token_P[place]]]
        if state == NEVER:
            return False
        place += 1
    if place == end or not is_final_Q[state]:
        return bool(is_final_Q[state])
    num_edges = graph.first_Q1[state + 1] - graph.first_Q1[state]
    return bool(num_edges == 1 and graph.class_E[graph.first_Q1[state]] == end_class)


@compiled
def solve(
    parts: Parts, slot: int, branch: int, fields_8R: Int, graph: Graph, tail: int, part: Part, given: Given,
    uniform_W: Score, is_normed: bool, takes_entropy: bool, entry_N: Int, space: Workspace, values_3T: Float,
) -> None:  # fmt: skip
    """Write what a row predicts at masks: tokens of the best solution, or of the one that uniform_W draws."""
    width = part.width
    count = find_entries(parts, slot, branch, fields_8R, entry_N)
    offset = Tables(*parts).states[slot].window_start - part.begin
    _find_weights(offset, part, entry_N, count, given, is_normed, space.weight_WC)
    if len(uniform_W):
        drawn_path(
            graph, tail, part.class_W, width, part.state, part.is_alive_WQ, space.weight_WC, uniform_W, space.rest_WQ,
            space.path_W,
        )  # fmt: skip
    else:
        best_path(
            graph, tail, part.class_W, width, part.state, part.is_alive_WQ, part.is_possible_WC, space.weight_WC,
            space.highest_W1, space.score_2Q, space.state_2Q, space.best_S, space.place_S, space.back_WQ, space.path_W,
        )  # fmt: skip
    _write_row(parts, slot, offset, part, entry_N, count, given, space.path_W, takes_entropy, values_3T)


@compiled
def write_best(
    parts: Parts, slot: int, branch: int, fields_8R: Int, part: Part, given: Given, takes_entropy: bool, entry_N: Int,
    no_path: Any, values_3T: Float,
) -> None:  # fmt: skip
    """Write what a row predicts at masks: tokens of the most probable possible classes. no_path: empty."""
    count = find_entries(parts, slot, branch, fields_8R, entry_N)
    offset = Tables(*parts).states[slot].window_start - part.begin
    _write_row(parts, slot, offset, part, entry_N, count, given, no_path, takes_entropy, values_3T)


@compiled
def _find_weights(
    offset: int, part: Part, entry_N: Int, count: int, given: Given, is_normed: bool, weight_WC: Score
) -> None:
    """Write the logarithm of each class's weight at the masks that are predicted, 0 elsewhere. offset: of the row's
    first position in the part."""
    for place in range(part.width):
        for token_class in range(weight_WC.shape[1]):
            weight_WC[place, token_class] = 0.0
    for column in range(count):
        place = offset + column
        if not 0 <= place < part.width or part.class_W[place] != MASK:
            continue
        if entry_N[column] == NEVER:
            if len(given.carry_1C5):
                _weigh(given.carry_1C5[0], is_normed, weight_WC[place])
        else:
            index = _place_of(given.entry_X, entry_N[column])
            if index != NEVER:
                _weigh(given.values_XC5[index], is_normed, weight_WC[place])


@compiled
def _weigh(values_C5: Float, is_normed: bool, weight_C: Score) -> None:
    total = _log_sum(values_C5, WEIGHT) if is_normed else 0.0
    for token_class in range(len(weight_C)):
        weight_C[token_class] = values_C5[token_class, WEIGHT] - total


@compiled
def _log_sum(values_C5: Float, field: int) -> float:
    top, total = -inf, 0.0
    for token_class in range(len(values_C5)):
        top = max(top, float(values_C5[token_class, field]))
    for token_class in range(len(values_C5)):
        total += exp(values_C5[token_class, field] - top)
    return top + log(total)


@compiled
def _write_row(
    parts: Parts, slot: int, offset: int, part: Part, entry_N: Int, count: int, given: Given, path_W: Any,
    takes_entropy: bool, values_3T: Float,
) -> None:  # fmt: skip
    """Write what a row predicts at masks: tokens of the path's classes; if that is empty, of the most probable ones."""
    state = Tables(*parts).states[slot]
    for column in range(count):
        place, entry = offset + column, entry_N[column]
        if not 0 <= place < part.width or part.class_W[place] != MASK:
            continue
        taken = path_W[place] if len(path_W) else NEVER
        if entry == NEVER:
            if len(given.carry_1C5):
                told = _told(given.carry_1C5[0], part.is_possible_WC[place], taken, takes_entropy)
                state.carry_token, state.carry_probability, state.carry_confidence = told
        else:
            index = _place_of(given.entry_X, entry)
            if index != NEVER:
                told = _told(given.values_XC5[index], part.is_possible_WC[place], taken, takes_entropy)
                values_3T[0, entry], values_3T[1, entry], values_3T[2, entry] = told


@compiled
def _told(values_C5: Float, is_possible_C: Bool, taken: int, takes_entropy: bool) -> tuple[float, float, float]:
    """Return token, probability and confidence among the possible tokens. taken: its class; NEVER: the most probable
    one."""
    wanted, top = taken, np.float32(-inf)
    for token_class in range(len(is_possible_C)):
        if is_possible_C[token_class]:
            if values_C5[token_class, MASS] > top:
                top = values_C5[token_class, MASS]
            if taken == NEVER and (wanted == NEVER or values_C5[token_class, WEIGHT] > values_C5[wanted, WEIGHT]):
                wanted = token_class
    total = mean = 0.0
    for token_class in range(len(is_possible_C)):
        if is_possible_C[token_class]:
            share = exp(values_C5[token_class, MASS] - top)
            total += share
            if takes_entropy:
                mean += share * values_C5[token_class, MEAN]
    log_total = top + log(total)
    probability = exp(min(values_C5[wanted, LOGIT] - log_total, 0.0))
    confidence = min(mean / total - log_total, 0.0) if takes_entropy else probability
    return float(values_C5[wanted, TOKEN]), probability, confidence


@compiled
def _place_of(entry_X: Int, entry: int) -> int:
    low, high = 0, len(entry_X)
    while low < high:
        middle = (low + high) // 2
        if entry_X[middle] < entry:
            low = middle + 1
        else:
            high = middle
    return low if low < len(entry_X) and entry_X[low] == entry else NEVER
