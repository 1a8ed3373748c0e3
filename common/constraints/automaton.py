"""Finite automata over tokens: which canvases are texts of a language, and what a canvas in part may still become.

Tokens that lead from every state to the same next state are one class, so that a vocabulary of 150,000 is a few hundred
columns. Class 0 holds the tokens that lead nowhere.

Shapes: V vocabulary, Q states, C classes, E edges (state, class), P pairs of states, S sets of classes, X classes of
all sets, W positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]

NEVER = -1  # no state; no class
MASK = -1  # in the place of a token's class: any
FAR = 2**30  # tokens to a text's end, where there is none


class Graph(NamedTuple):
    """An automaton as compiled loops read it.

    Edges stand in the order of state and class, those of state q from first_Q1[q] on. Pairs are the next states of a
    state, each once; set_P names the classes that lead there, which stand in class_X from first_S1 on: few sets serve
    many pairs. distance_Q: the fewest tokens from each state to a text's end.
    """

    class_V: Int32
    next_QC: Int32
    first_Q1: Int
    source_E: Int32
    class_E: Int32
    target_E: Int32
    first_pair_Q1: Int
    target_P: Int32
    set_P: Int32
    first_S1: Int
    class_X: Int32
    distance_Q: Int


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton. class_V: the class of each token. next_QC: the next state, or NEVER. key: equal
    automata have equal ones.

    end, end_class: the state after an end token, and the end tokens' class; NEVER where only texts are accepted.
    may_end: an end token may stand after a text; else canvases are full. is_whole_when_full: a full canvas holds a
    text that has come to its end, not one that was cut.
    """

    class_V: Int32
    next_QC: Int32
    is_final_Q: Bool
    start: int
    key: str
    end: int = NEVER
    end_class: int = NEVER
    may_end: bool = True
    is_whole_when_full: bool = True

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}  # not what is worked out of them

    @property
    def num_states(self) -> int:
        return len(self.next_QC)

    @property
    def num_classes(self) -> int:
        return int(self.next_QC.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of its tables."""
        return self.class_V.nbytes + self.next_QC.nbytes + self.is_final_Q.nbytes

    @cached_property
    def graph(self) -> Graph:
        source_E, class_E, target_E = self.edges_3E.astype(np.int32)
        order_E = np.lexsort((class_E, target_E, source_E))
        pairs_2P, first_P = np.unique(self.edges_3E[::2, order_E], axis=1, return_index=True)
        sets: dict[bytes, int] = {}
        classes_P = [one_C.tobytes() for one_C in np.split(class_E[order_E], first_P[1:])]
        set_P = np.array([sets.setdefault(classes, len(sets)) for classes in classes_P], np.int32)
        sizes_S = [len(classes) // class_E.itemsize for classes in sets]
        places_Q1 = np.arange(self.num_states + 1)
        return Graph(
            self.class_V, self.next_QC, source_E.searchsorted(places_Q1), source_E, class_E, target_E,
            pairs_2P[0].searchsorted(places_Q1), pairs_2P[1].astype(np.int32), set_P, np.cumsum([0, *sizes_S]),
            np.frombuffer(b"".join(sets), np.int32), self.distance_Q,
        )  # fmt: skip

    @cached_property
    def edges_3E(self) -> Int:
        """State, class and next state of each edge, in the order of state and class."""
        source_E, class_E = np.nonzero(self.next_QC >= 0)
        return np.stack((source_E, class_E, self.next_QC[source_E, class_E])).astype(np.int64)

    @cached_property
    def distance_Q(self) -> Int:
        """Return the fewest tokens from each state to a text's end."""
        source_E, _, target_E = self.edges_3E
        return distances(source_E, target_E, self.is_final_Q)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest text."""
        return int(self.distance_Q[self.start])

    def apart(self, token_ids: Sequence[int]) -> Automaton:
        """Return the same automaton with a class of its own for each of these tokens."""
        class_V, own = self.class_V.copy(), sorted(set(token_ids))
        next_QC = np.concatenate((self.next_QC, self.next_QC[:, class_V[own]]), axis=1)
        class_V[own] = self.num_classes + np.arange(len(own))
        next_QC[:, np.bincount(class_V, minlength=next_QC.shape[1]) == 0] = NEVER
        return replace(self, class_V=class_V, next_QC=next_QC, key=f"{self.key}/apart {own}")

    def closed(self, end_ids: Sequence[int]) -> Automaton:
        """Return the automaton of canvases: a text, and after it end tokens up to the canvas's end."""
        num_states, num_classes = self.next_QC.shape
        class_V = self.class_V.copy()
        class_V[[id for id in end_ids if id < len(class_V)]] = num_classes
        next_QC = np.full((num_states + 1, num_classes + 1), NEVER, np.int32)
        next_QC[:-1, :-1] = self.next_QC
        next_QC[:, np.bincount(class_V, minlength=num_classes + 1) == 0] = NEVER
        next_QC[np.append(self.is_final_Q & self.may_end, True), num_classes] = num_states
        return replace(
            self, class_V=class_V, next_QC=next_QC, is_final_Q=np.append(self.is_final_Q, True),
            key=f"{self.key}/{sorted(end_ids)}", end=num_states, end_class=num_classes,
        )  # fmt: skip

    def after(self, state: int, class_W: Int) -> int:
        """Return the state that tokens of these classes lead to, or NEVER."""
        for token_class in class_W.tolist():
            if state == NEVER:
                break
            state = int(self.next_QC[state, token_class])
        return state


def distances(source_E: Int, target_E: Int, is_final_Q: Bool) -> Int:
    """Return the fewest edges from each state to a final one, FAR where none is reached. Each edge is seen once, for a
    chain of thousands of states has as many rounds."""
    source_E = source_E[target_E.argsort(kind="stable")]
    count_Q = np.bincount(target_E, minlength=len(is_final_Q))
    first_Q = count_Q.cumsum() - count_Q
    distance_Q = np.where(is_final_Q, 0, FAR)
    here_X, distance = is_final_Q.nonzero()[0], 0
    while len(here_X):
        before_X = source_E[places(first_Q[here_X], count_Q[here_X])]
        distance += 1
        before_X = before_X[distance_Q[before_X] == FAR]
        distance_Q[before_X] = distance
        here_X = np.unique(before_X)
    return distance_Q


def places(first_X: Int, count_X: Int) -> Int:
    """Return first, first + 1, ... of each, so many."""
    end_X = count_X.cumsum()
    total = int(end_X[-1]) if len(end_X) else 0
    found: Int = (first_X - end_X + count_X).repeat(count_X) + np.arange(total)
    return found
