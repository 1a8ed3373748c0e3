"""One token class for every mask of a canvas at once, so that the whole is accepted: the best such filling, or an exact
sample of the product of the positions' distributions, given that the whole is accepted.

Whatever part of such a filling is written, the rest of the canvas can still be filled: with that filling.

Shapes: W positions, C classes, Q states, S sets of classes. `class_W`: the class of each position, MASK for any.
`is_alive_WQ`, of one position more: the states before each position, and after the last, that lie on a way of such a
filling.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import Any

from common.compiled import compiled
from common.constraints import MASK, NEVER, Graph
from common.decoding.plan import Bool, Score

Int32 = Any  # an array of it


@compiled
def find_alive(graph: Graph, class_W: Int32, width: int, state: int, num_left: int, is_alive_WQ: Bool) -> bool:
    """Write the states that lie on a way from `state` through `width` positions to one from which num_left masks more
    can be filled. Returns whether there is such a way."""
    num_states = len(graph.distance_Q)
    is_alive_WQ[0, :num_states] = False
    is_alive_WQ[0, state] = True
    for place in range(width):
        _step(graph, class_W, place, num_states, is_alive_WQ)
    is_any = False
    for state in range(num_states):
        is_alive_WQ[width, state] &= graph.distance_Q[state] <= num_left
        is_any |= is_alive_WQ[width, state]
    if is_any:
        for place in range(width - 1, -1, -1):
            for state in range(num_states):
                if is_alive_WQ[place, state]:
                    is_alive_WQ[place, state] = _goes_on(graph, class_W[place], state, is_alive_WQ[place + 1])
    return is_any


@compiled
def _step(graph: Graph, class_W: Int32, place: int, num_states: int, is_alive_WQ: Bool) -> None:
    """Write the states that those before the position lead to."""
    token_class = class_W[place]
    if token_class == MASK and place and class_W[place - 1] == MASK:
        is_same = True
        for state in range(num_states):
            is_same &= is_alive_WQ[place, state] == is_alive_WQ[place - 1, state]
        if is_same:  # as it will be from now on
            for state in range(num_states):
                is_alive_WQ[place + 1, state] = is_alive_WQ[place, state]
            return
    is_alive_WQ[place + 1, :num_states] = False
    for state in range(num_states):
        if not is_alive_WQ[place, state]:
            continue
        if token_class == MASK:
            for pair in range(graph.first_pair_Q1[state], graph.first_pair_Q1[state + 1]):
                is_alive_WQ[place + 1, graph.target_P[pair]] = True
        elif graph.next_QC[state, token_class] != NEVER:
            is_alive_WQ[place + 1, graph.next_QC[state, token_class]] = True


@compiled
def _goes_on(graph: Graph, token_class: int, state: int, is_alive_Q: Bool) -> bool:
    if token_class != MASK:
        target = graph.next_QC[state, token_class]
        return bool(target != NEVER and is_alive_Q[target])
    for pair in range(graph.first_pair_Q1[state], graph.first_pair_Q1[state + 1]):
        if is_alive_Q[graph.target_P[pair]]:
            return True
    return False


@compiled
def _fits(wanted: int, token_class: int) -> bool:
    if wanted == MASK:
        return True
    return wanted == token_class


@compiled
def find_possible(graph: Graph, is_alive_WQ: Bool, place: int, is_possible_C: Bool) -> None:
    """Write the classes that a mask may have."""
    is_possible_C[:] = False
    for state in range(len(graph.distance_Q)):
        if is_alive_WQ[place, state]:
            for edge in range(graph.first_Q1[state], graph.first_Q1[state + 1]):
                if is_alive_WQ[place + 1, graph.target_E[edge]]:
                    is_possible_C[graph.class_E[edge]] = True


@compiled
def best_path(
    graph: Graph, tail: int, class_W: Int32, width: int, state: int, is_alive_WQ: Bool, is_possible_WC: Bool,
    weight_WC: Score, highest_W1: Score, score_2Q: Score, state_2Q: Int32, best_S: Score, place_S: Int32,
    back_WQ: Int32, path_W: Int32,
) -> None:  # fmt: skip
    """Write the classes of the filling with the highest sum of weights (Viterbi); of equal ones the first by state and
    class. Source: DINGO (arXiv 2505.23061), over whole texts.

    tail: the state after an end token, where anything may follow it and weighs as what is best there; NEVER: end tokens
    do. is_possible_WC: the classes that a mask may have. weight_WC: 0 where no mask is. highest_W1, score_2Q, state_2Q,
    best_S, place_S, back_WQ: scratch.

    States from which not even the highest weights reach what a greedy filling does are left out: there can be no best
    filling through them.
    """
    num_states = len(graph.distance_Q)
    highest_W1[width] = 0.0
    for place in range(width - 1, -1, -1):
        highest_W1[place] = highest_W1[place + 1]
        if class_W[place] == MASK:
            is_tail_alive = tail != NEVER and is_alive_WQ[place, tail]
            highest_W1[place] += _highest(weight_WC[place], is_possible_WC[place], is_tail_alive)
    least = _greedy(graph, tail, class_W, width, state, is_alive_WQ, weight_WC)
    least -= 1e-6 * (1.0 + abs(least))  # sums of other order round otherwise
    count, state_2Q[0, 0], score_2Q[0, state] = 1, state, 0.0
    place_S[:] = NEVER  # where best_S is of
    for place in range(width):
        here, there, token_class = place % 2, 1 - place % 2, class_W[place]
        back_WQ[place, :num_states] = NEVER
        num_reached = 0
        for index in range(count):
            source = state_2Q[here, index]
            score = score_2Q[here, source]
            if token_class != MASK:
                target = graph.next_QC[source, token_class]
                if target != NEVER and is_alive_WQ[place + 1, target]:
                    num_reached = _offer(
                        score, source, target, score_2Q[there], back_WQ[place], state_2Q[there], num_reached
                    )
                continue
            for pair in range(graph.first_pair_Q1[source], graph.first_pair_Q1[source + 1]):
                if is_alive_WQ[place + 1, graph.target_P[pair]]:
                    number = graph.set_P[pair]
                    if source == tail:
                        weight = _top(weight_WC, place)
                    elif place_S[number] == place:
                        weight = best_S[number]
                    else:
                        weight = weight_WC[place, _best_class(graph, number, weight_WC[place])]
                        best_S[number], place_S[number] = weight, place
                    if score + weight + highest_W1[place + 1] >= least:
                        num_reached = _offer(
                            score + weight, source, graph.target_P[pair], score_2Q[there], back_WQ[place],
                            state_2Q[there], num_reached,
                        )  # fmt: skip
        count = num_reached
    _follow_back(graph, tail, class_W, width, state, weight_WC, score_2Q, back_WQ, path_W)


@compiled
def _offer(
    value: float, source: int, target: int, score_Q: Score, back_Q: Int32, reached_X: Int32, num_reached: int
) -> int:
    """Take a way to a state if it is the best one so far, of equal ones that from the first state. Returns how many
    states are reached."""
    if back_Q[target] == NEVER:
        reached_X[num_reached] = target
        num_reached += 1
    elif value < score_Q[target] or (value == score_Q[target] and source > back_Q[target]):
        return num_reached
    score_Q[target], back_Q[target] = value, source
    return num_reached


@compiled
def _best_class(graph: Graph, number: int, weight_C: Score) -> int:
    """Return the class of a set that weighs most."""
    best = graph.class_X[graph.first_S1[number]]
    for index in range(graph.first_S1[number] + 1, graph.first_S1[number + 1]):
        if weight_C[graph.class_X[index]] > weight_C[best]:
            best = graph.class_X[index]
    return int(best)


@compiled
def _highest(weight_C: Score, is_possible_C: Bool, is_any: bool) -> float:
    highest = -inf
    for token_class in range(len(weight_C)):
        if is_possible_C[token_class] or is_any:
            highest = max(highest, weight_C[token_class])
    return float(highest)


@compiled
def _follow_back(
    graph: Graph, tail: int, class_W: Int32, width: int, state: int, weight_WC: Score, score_2Q: Score, back_WQ: Int32,
    path_W: Int32,
) -> None:  # fmt: skip
    best = -inf
    for last in range(len(graph.distance_Q) if width else 0):
        if back_WQ[width - 1, last] != NEVER and (score_2Q[width % 2, last] > best or best == -inf):
            state, best = last, score_2Q[width % 2, last]
    for place in range(width - 1, -1, -1):
        source, token_class = back_WQ[place, state], class_W[place]
        if token_class == MASK:
            pair = graph.first_pair_Q1[source]
            while graph.target_P[pair] != state:
                pair += 1
            number = graph.set_P[pair]
            token_class = graph.class_X[graph.first_S1[number]]
            if source != tail:
                token_class = _best_class(graph, number, weight_WC[place])
        path_W[place], state = token_class, source


@compiled
def _greedy(
    graph: Graph, tail: int, class_W: Int32, width: int, state: int, is_alive_WQ: Bool, weight_WC: Score
) -> float:
    """Return the sum of weights of the filling that takes the best class after the best."""
    total = 0.0
    for place in range(width):
        best, target = -inf, NEVER
        for edge in range(graph.first_Q1[state], graph.first_Q1[state + 1]):
            if is_alive_WQ[place + 1, graph.target_E[edge]] and _fits(class_W[place], graph.class_E[edge]):
                weight = _weight(graph, tail, weight_WC, place, edge)
                if weight > best or target == NEVER:
                    best, target = weight, graph.target_E[edge]
        total += best
        state = target
    return total


@compiled
def _weight(graph: Graph, tail: int, weight_WC: Score, place: int, edge: int) -> float:
    if graph.source_E[edge] == tail:
        return _top(weight_WC, place)
    return float(weight_WC[place, graph.class_E[edge]])


@compiled
def _top(weight_WC: Score, place: int) -> float:
    top = -inf
    for token_class in range(weight_WC.shape[1]):
        top = max(top, weight_WC[place, token_class])
    return float(top)


@compiled
def drawn_path(
    graph: Graph, tail: int, class_W: Int32, width: int, state: int, is_alive_WQ: Bool, weight_WC: Score,
    uniform_W: Score, rest_WQ: Score, path_W: Int32,
) -> None:  # fmt: skip
    """Write the classes of a sample of prod p_i(x_i), given acceptance, exact but for rounding in float64 logarithms.
    Source: backward messages and forward draws, as for a hidden Markov model (arXiv 2607.07026).

    tail: the state after an end token, where anything may follow it; NEVER: end tokens do. weight_WC: logarithms of the
    classes' probabilities. uniform_W: random numbers in [0, 1). rest_WQ: scratch, of one position more.
    """
    num_states = len(graph.distance_Q)
    rest_WQ[width, :num_states] = 0.0
    for place in range(width - 1, -1, -1):
        for source in range(num_states):
            rest_WQ[place, source] = -inf
            if is_alive_WQ[place, source]:
                top, total = _sum(graph, tail, class_W[place], is_alive_WQ, weight_WC, rest_WQ, place, source)
                rest_WQ[place, source] = top + log(total) if total > 0 else -inf
    for place in range(width):
        top, total = _sum(graph, tail, class_W[place], is_alive_WQ, weight_WC, rest_WQ, place, state)
        wanted, passed, taken = uniform_W[place] * total, 0.0, NEVER
        for edge in range(graph.first_Q1[state], graph.first_Q1[state + 1]):
            if is_alive_WQ[place + 1, graph.target_E[edge]] and _fits(class_W[place], graph.class_E[edge]):
                weight = _own(graph, tail, weight_WC, place, edge) + rest_WQ[place + 1, graph.target_E[edge]]
                passed += exp(weight - top) if top > -inf else 1.0
                taken = edge
                if passed > wanted:
                    break
        path_W[place], state = graph.class_E[taken], graph.target_E[taken]


@compiled
def _sum(
    graph: Graph, tail: int, token_class: int, is_alive_WQ: Bool, weight_WC: Score, rest_WQ: Score, place: int,
    source: int,
) -> tuple[float, float]:  # fmt: skip
    """Return the highest logarithm of the ways from a state on, and the sum of all by it."""
    top, total = -inf, 0.0
    for edge in range(graph.first_Q1[source], graph.first_Q1[source + 1]):
        if is_alive_WQ[place + 1, graph.target_E[edge]] and _fits(token_class, graph.class_E[edge]):
            value = _own(graph, tail, weight_WC, place, edge) + rest_WQ[place + 1, graph.target_E[edge]]
            if value > top:
                total, top = total * exp(top - value) + 1.0 if top > -inf else 1.0, value
            elif top > -inf:
                total += exp(value - top)
    return top, total


@compiled
def _own(graph: Graph, tail: int, weight_WC: Score, place: int, edge: int) -> float:
    return 0.0 if graph.source_E[edge] == tail else float(weight_WC[place, graph.class_E[edge]])
