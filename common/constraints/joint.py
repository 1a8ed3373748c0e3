"""One token class for every mask of a canvas at once, so that the whole is accepted: the best such filling, or an exact
sample of the product of the positions' distributions, given that the whole is accepted.

Whatever part of such a filling is written, the rest of the canvas can still be filled: with that filling.

Shapes: W positions, C classes, Q states, X edges of a position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.constraints.automaton import Automaton, Bool, Int, Lattice

Score = npt.NDArray[np.float64]


def best_path(automaton: Automaton, lattice: Lattice, weight_WC: Score, state: int, *, is_tail_free: bool) -> Int:
    """[W]: the classes of the filling with the highest sum of weights (Viterbi); of equal ones the first in the order
    of edges. Source: DINGO (arXiv 2505.23061), over whole texts.

    is_tail_free: anything may follow the first end token, and weighs as what is best there; else end tokens do.
    """
    source_E, class_E, target_E = automaton.edges_3E
    score_Q, back_WQ = np.full(automaton.num_states, -np.inf), np.zeros((len(lattice), automaton.num_states), np.int64)
    score_Q[state] = 0.0
    for place, edge_X in enumerate(lattice):
        own_X = _weights(automaton, edge_X, weight_WC[place], weight_WC[place].max() if is_tail_free else None)
        value_X = score_Q[source_E[edge_X]] + own_X
        top_X, target_X = _over_groups(np.maximum, value_X, target_E[edge_X])
        hit_X = (value_X == top_X).nonzero()[0][::-1]  # of equal ones the first is written last
        score_Q = np.full_like(score_Q, -np.inf)
        score_Q[target_X] = top_X
        back_WQ[place, target_X[hit_X]] = edge_X[hit_X]
    state, path_W = int(score_Q.argmax()), np.zeros(len(lattice), np.int64)
    for place in range(len(lattice) - 1, -1, -1):
        edge = back_WQ[place, state]
        path_W[place], state = class_E[edge], int(source_E[edge])
    return path_W


def drawn_path(
    automaton: Automaton, lattice: Lattice, weight_WC: Score, state: int, draws: np.random.Generator, *,
    is_tail_free: bool,
) -> Int:  # fmt: skip
    """[W]: the classes of a sample of prod p_i(x_i), given acceptance, exact but for rounding in float64 logarithms.
    Source: backward messages and forward draws, as for a hidden Markov model (arXiv 2607.07026).

    weight_WC: logarithms of the classes' probabilities. is_tail_free: anything may follow the first end token; else
    end tokens do.
    """
    source_E, class_E, target_E = automaton.edges_3E
    value_of: list[Score] = []
    rest_Q: Score = np.zeros(automaton.num_states)
    for place in range(len(lattice) - 1, -1, -1):
        edge_X = lattice[place]
        own_X = _weights(automaton, edge_X, weight_WC[place], 0.0 if is_tail_free else None)
        value_X = own_X + rest_Q[target_E[edge_X]]
        value_of.append(value_X)
        order_X = source_E[edge_X].argsort(kind="stable")
        value_X, source_X = value_X[order_X], source_E[edge_X][order_X]
        top_X, _ = _over_groups(np.maximum, value_X, source_X)
        sum_X, _ = _over_groups(np.add, np.exp(value_X - top_X), source_X)
        rest_Q = np.full_like(rest_Q, -np.inf)
        rest_Q[source_X] = top_X + np.log(sum_X)
    path_W = np.zeros(len(lattice), np.int64)
    for place, (edge_X, value_X) in enumerate(zip(lattice, reversed(value_of), strict=True)):
        own = (source_E[edge_X] == state).nonzero()[0]
        edge = edge_X[own[_drawn(value_X[own], draws.random())]]
        path_W[place], state = class_E[edge], int(target_E[edge])
    return path_W


def possible(automaton: Automaton, lattice: Lattice) -> Bool:
    """[W, C]: the classes that each position may have."""
    is_possible_WC = np.zeros((len(lattice), automaton.num_classes), np.bool_)
    class_E = automaton.edges_3E[1]
    for place, edge_X in enumerate(lattice):
        is_possible_WC[place, class_E[edge_X]] = True
    return is_possible_WC


def _weights(automaton: Automaton, edge_X: Int, weight_C: Score, tail: float | None) -> Score:
    """Return the edges' weights. tail: that of what follows an end token; None: its own."""
    source_E, class_E, _ = automaton.edges_3E
    weight_X = weight_C[class_E[edge_X]]
    return weight_X if tail is None else np.where(source_E[edge_X] == automaton.end, tail, weight_X)


def _over_groups(reduce: np.ufunc, value_X: Score, group_X: Int) -> tuple[Score, Int]:
    """Return each edge's reduced value of all edges of its group, which stand together, and the groups."""
    first = np.r_[True, group_X[1:] != group_X[:-1]].nonzero()[0]
    length = np.diff(np.r_[first, len(group_X)])
    reduced: Score = reduce.reduceat(value_X, first).repeat(length)
    return reduced, group_X


def _drawn(value_X: Score, uniform: float) -> int:
    """Return a place, with probabilities in proportion to exp(value)."""
    weight_X = np.exp(value_X - value_X.max()).cumsum()
    return int(min(weight_X.searchsorted(uniform * weight_X[-1], side="right"), len(weight_X) - 1))
