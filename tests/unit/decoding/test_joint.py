"""Solutions and samples against enumeration of all canvases over a small alphabet."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from common.constraints import MASK, Automaton, ByteAutomaton, Trie, lift
from common.decoding.scheduling.held.joint import find_possible
from tests.fillings import alive, best, drawn

TOKENS = {0: b"a", 1: b"b", 2: b"ab", 3: b"ba", 4: b"c"}
EOS, VOCAB = 5, 7


def automaton(texts: tuple[str, ...] = ("ab", "c", "abba", "cba", "cbaba", "ababab", "cc")) -> Automaton:
    made = lift(ByteAutomaton.of_texts(texts), Trie.of(TOKENS, VOCAB))
    assert made is not None
    return made.closed([EOS])


def canvases(own: Automaton, token_W: list[int]) -> list[tuple[int, ...]]:
    """All canvases that the automaton accepts and that have these tokens where no mask is."""
    choices = [range(VOCAB) if token == MASK else [token] for token in token_W]
    accepted = []
    for canvas in itertools.product(*choices):
        state = own.after(own.start, own.class_V[list(canvas)])
        if state >= 0 and own.is_final_Q[state]:
            accepted.append(canvas)
    return accepted


def classes(own: Automaton, token_W: list[int]) -> np.ndarray:
    return np.array([MASK if token == MASK else own.class_V[token] for token in token_W], np.int32)


def cases() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [
        np.where(rng.random(width) < 0.25, rng.integers(0, VOCAB, width), MASK).tolist()
        for width in range(1, 6)
        for _ in range(12)
    ]


@pytest.mark.parametrize("token_W", cases(), ids=str)
def test_what_is_possible_and_what_is_best_are_those_of_enumeration(token_W: list[int]) -> None:
    own, rng = automaton(), np.random.default_rng(len(token_W))
    accepted = canvases(own, token_W)
    class_W = classes(own, token_W)
    is_alive_WQ = alive(own, class_W)
    assert (is_alive_WQ is not None) == bool(accepted)
    if is_alive_WQ is None:
        return
    logit_WV = rng.standard_normal((len(token_W), VOCAB)) * 2
    is_possible_C = np.zeros(own.num_classes, np.bool_)
    for place in (class_W == MASK).nonzero()[0]:
        find_possible(own.graph, is_alive_WQ, place, is_possible_C)
        assert {int(own.class_V[canvas[place]]) for canvas in accepted} == {*is_possible_C.nonzero()[0].tolist()}
    weight_WC = np.stack([logit_WV[:, own.class_V == c].max(axis=1, initial=-1e30) for c in range(own.num_classes)], 1)
    weight_WC[np.array(token_W) != MASK] = 0
    path_W = best(own, class_W, weight_WC)
    highest = max(sum(logit_WV[p, t] for p, t in enumerate(c) if token_W[p] == MASK) for c in accepted)
    assert sum(weight_WC[place, c] for place, c in enumerate(path_W)) == pytest.approx(highest, abs=1e-9)
    assert tuple(path_W) in {tuple(own.class_V[list(canvas)]) for canvas in accepted}


def test_a_free_tail_weighs_as_what_is_best_after_the_first_end() -> None:
    own = automaton(("a", "ba"))
    weight_WC = np.full((4, own.num_classes), -1.0)
    weight_WC[:, own.end_class] = -5.0
    for is_tail_free, ends in ((True, -8.0), (False, -12.0)):
        path_W = best(own, np.full(4, MASK, np.int32), weight_WC, is_tail_free)
        first = path_W.index(own.end_class)
        counted = path_W[: first + 1] if is_tail_free else path_W
        rest = -1.0 * (len(path_W) - len(counted))
        assert weight_WC[np.arange(len(counted)), counted].sum() + rest == pytest.approx(ends)


@pytest.mark.parametrize("is_tail_free", [False, True])
def test_samples_have_the_exact_distribution(is_tail_free: bool) -> None:
    """Chi-square with a fixed seed: below the value that one sample of a thousand exceeds."""
    own, rng, width, num_draws = automaton(), np.random.default_rng(3), 4, 5_000
    logit_WV = rng.standard_normal((width, VOCAB))
    probability_WV = np.exp(logit_WV) / np.exp(logit_WV).sum(axis=1, keepdims=True)
    mass_WC = np.stack([probability_WV[:, own.class_V == c].sum(axis=1) for c in range(own.num_classes)], 1)
    exact: Counter[tuple[int, ...]] = Counter()
    for canvas in canvases(own, [MASK] * width):
        own_W = [probability_WV[place, token] for place, token in enumerate(canvas)]
        stop = canvas.index(EOS) + 1 if EOS in canvas and is_tail_free else width
        exact[tuple(own.class_V[list(canvas)].tolist())] += float(np.prod(own_W[:stop]))
    with np.errstate(divide="ignore"):
        weight_WC = np.log(mass_WC)
    draws = np.random.default_rng(7)
    class_W = np.full(width, MASK, np.int32)
    counts = Counter(tuple(drawn(own, class_W, weight_WC, draws, is_tail_free)) for _ in range(num_draws))
    assert counts.keys() <= exact.keys()
    total = sum(exact.values())
    chi2 = sum((counts[path] - num_draws * p / total) ** 2 / (num_draws * p / total) for path, p in exact.items())
    assert chi2 < _chi2_bound(len(exact) - 1)


def _chi2_bound(degrees: int) -> float:
    """The 99.9th percentile, by Wilson and Hilferty's approximation."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def test_paths_of_tiny_probability_are_not_lost() -> None:
    """One of two texts weighs e^-1000 of the other, and only it fits a fixed token on the right."""
    own = automaton(("ab", "cc"))
    weight_WC = np.zeros((2, own.num_classes))
    weight_WC[0, own.class_V[4]] = -2000.0
    class_W = np.array([MASK, own.class_V[4]], np.int32)
    assert drawn(own, class_W, weight_WC, np.random.default_rng(0)) == [own.class_V[4], own.class_V[4]]


def test_the_shortest_text_is_counted_in_tokens() -> None:
    assert automaton(("abba", "ababab")).shortest == 2
    assert automaton(("c",)).shortest == 1
