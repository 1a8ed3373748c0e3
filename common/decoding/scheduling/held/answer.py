"""Answers that are held to a format: what a pass predicts for them is replaced by what their automaton leaves possible.

Before rows are scored, every mask of every row gets its best possible token, by the anchor's canvas; once there is a
winner, every mask of it gets its token of one joint solution. So fills, forced fills, tokens that begin a block and
lookaheads are parts of one accepted canvas, and the loops that write them know nothing of formats. Blocks that are not
opened are masks of the canvas too: an answer always fits into what is left.

Probabilities and confidences are those among the tokens that are possible at the position.

Shapes: Q states, C classes, P positions of the answer, W those of the part that is solved, N those that a row predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from common.constraints import NEVER, Automaton
from common.decoding.plan import ClassField, ClassStatistics, Float, Int
from common.decoding.request import GenerationRequest
from common.decoding.scheduling.held.joint import best_path, drawn_path
from common.decoding.scheduling.held.loops import find_entries, find_part, find_weights, look, write_row
from common.decoding.scheduling.rules import Rules
from common.decoding.scheduling.tables import Parts, Tables
from common.policies import Draws

_STREAM = 2  # of random numbers: others are the scores' and the spawn rules'


_NO_CARRY = np.empty((0, 1, len(ClassField)), np.float32)
_NO_PATH = np.empty(0, np.int32)


class Scratch:
    """Arrays that loops write into, in memory that all requests share."""

    def __init__(self) -> None:
        self._flat: dict[str, Any] = {}

    def of(self, name: str, dtype: type[Any], *shape: int) -> Any:
        """Return an array with anything in it."""
        size, flat = prod(shape), self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = np.empty(2 * size, dtype)
        return flat[:size].reshape(shape)


class Pass(NamedTuple):
    """A request's part of the pass that is being finished. parts: of tables. classes: of its automaton."""

    tables: Tables
    parts: Parts
    slot: int
    values_3T: Float
    fields_8R: Int
    classes: ClassStatistics
    scratch: Scratch

    @property
    def state(self) -> Any:
        return self.tables.states[self.slot]


class _Part(NamedTuple):
    """The positions from `begin` on that are solved. state: before them. reach: up to where it was asked for."""

    begin: int
    width: int
    state: int
    reach: int
    class_W: Any
    is_alive_WQ: Any
    is_possible_WC: Any


@dataclass(slots=True)
class Held:
    """The format of a request's answer. automaton: of canvases (`Automaton.closed`). begin, end: the positions that
    count. is_tail_free: anything may follow an end token, as in models that are not trained to fill it with these.
    takes_entropy: the confidence is the negative entropy, else the probability.

    carry_1C5: statistics of the first position after the cache, kept from the step that committed the one before; empty
    where there are none.
    """

    automaton: Automaton
    begin: int
    end: int
    noise_key: int
    is_sampled: bool
    is_tail_free: bool
    takes_entropy: bool
    carry_1C5: Float = field(default_factory=lambda: _NO_CARRY)
    _anchor: _Part | None = None  # of the pass

    @classmethod
    def of(cls, automaton: Automaton, request: GenerationRequest, rules: Rules, noise_key: int) -> Held:
        """automaton: closed by the end tokens of the rules."""
        decode, begin = rules.decode, len(request.prompt)
        most = decode.max_new_tokens if decode.strategy.is_from_zero else rules.max_blocks * rules.block_size
        most = most if request.max_tokens is None else min(request.max_tokens, most)
        return cls(
            automaton, begin, begin + most, noise_key, decode.temperature > 0, decode.strategy.is_from_zero,
            decode.sampling_strategy == "neg_entropy",
        )  # fmt: skip

    def score_ready(self, own: Pass) -> bool:
        """Write each row's predictions by what the anchor leaves possible. Returns False where nothing is."""
        state = own.state
        reach = int(state["widest_end"]) + bool(state["predicts_next"])
        part = self._anchor = self._part(own, reach, NEVER)
        if part is None:
            return False
        for branch in range(int(state["num_rows"])):
            self._write(own, part, *self._entries(own, branch), _NO_PATH)
        return True

    def solve(self, own: Pass, winner: int) -> bool:
        """Write the winning row's predictions: its tokens of one solution. Returns False where there is none."""
        state = own.state
        branch = winner - int(state["first_row"])
        made = own.tables.branches_K[own.slot, branch]
        reach = int(state["window_end"]) + 1 if state["predicts_next"] else int(made["masks_end"])
        part, self._anchor = self._anchor, None
        if part is None or part.reach != reach or made["num_fills"]:
            part = self._part(own, reach, branch)
        if part is None:
            return False
        if part.width:
            entry_N, count = self._entries(own, branch)
            self._write(own, part, entry_N, count, self._path(own, part, entry_N, count))
        self._keep_carry(own, branch)
        return True

    def is_complete(self, parts: Parts, slot: int, scratch: Scratch) -> bool:
        """Return whether the answer stands: its canvas is full, or nothing but an end token may follow what it has."""
        automaton = self.automaton
        class_P = scratch.of("class", np.int32, self.end - self.begin)
        first, _, state = find_part(
            parts, slot, automaton.graph, automaton.start, self.begin, self.end, 0, NEVER, class_P
        )
        if state == NEVER or not automaton.is_final_Q[state]:
            return False
        if self.begin + first >= self.end:
            return True
        only = np.flatnonzero(automaton.next_QC[state] >= 0)
        return only.tolist() == [automaton.end_class]

    def _part(self, own: Pass, reach: int, branch: int) -> _Part | None:
        """Return the part from the first mask to the last position that is predicted or filled. None where it has no
        solution."""
        automaton = self.automaton
        graph = automaton.graph
        class_P = np.empty(self.end - self.begin, np.int32)
        first, width, state = find_part(
            own.parts, own.slot, graph, automaton.start, self.begin, self.end, reach, branch, class_P
        )
        part = _Part(
            self.begin + first, width, state, reach, class_P[first:],
            np.empty((width + 1, automaton.num_states), np.bool_), np.empty((width, automaton.num_classes), np.bool_),
        )  # fmt: skip
        num_left = self.end - part.begin - width
        if not look(graph, state, part.class_W, width, num_left, part.is_alive_WQ, part.is_possible_WC):
            return None
        return part

    def _entries(self, own: Pass, branch: int) -> tuple[Int, int]:
        """Return the entries that predict the row's positions from the window's start on, and how many there are."""
        entry_N = own.scratch.of("entry_N", np.int64, own.values_3T.shape[1] + 1)
        return entry_N, find_entries(own.parts, own.slot, branch, own.fields_8R, entry_N)

    def _path(self, own: Pass, part: _Part, entry_N: Int, count: int) -> Any:
        """Return the classes of one solution."""
        automaton, width, array = self.automaton, part.width, own.scratch.of
        num_states = automaton.num_states
        weight_WC, path_W = array("weight", np.float64, width, automaton.num_classes), array("path", np.int32, width)
        tail = automaton.end if self.is_tail_free else NEVER
        find_weights(
            int(own.state["window_start"]) - part.begin, part.class_W, width, entry_N, count, own.classes.entry_X,
            own.classes.values_XC5, self.carry_1C5, self.is_sampled and self.is_tail_free, weight_WC,
        )  # fmt: skip
        problem = automaton.graph, tail, part.class_W, width, part.state, part.is_alive_WQ, weight_WC
        if self.is_sampled:
            number = int(own.state["num_forwards"] + own.state["num_skipped"])
            draws = Draws(self.noise_key, number, _STREAM).generator()
            drawn_path(*problem, draws.random(width), array("rest", np.float64, width + 1, num_states), path_W)
        else:
            scores = array("highest", np.float64, width + 1), array("score", np.float64, 2, num_states)
            best_path(*problem, *scores, array("back", np.int32, width, num_states), path_W)
        return path_W

    def _write(self, own: Pass, part: _Part, entry_N: Int, count: int, path_W: Any) -> None:
        """Write what the row predicts: tokens of the path's classes; without a path of the most probable classes."""
        write_row(
            own.parts, own.slot, int(own.state["window_start"]) - part.begin, part.class_W, part.width, entry_N, count,
            own.classes.entry_X, own.classes.values_XC5, self.carry_1C5, part.is_possible_WC, path_W,
            self.takes_entropy, own.values_3T,
        )  # fmt: skip

    def _keep_carry(self, own: Pass, branch: int) -> None:
        """Keep what the winner predicts for the next window's first position (`planning.carries`)."""
        state, settings = own.state, own.tables.settings[own.slot]
        if state["commit_length"] > 0 and state["keeps_carry"] and not settings["is_fresh"] and state["shift"] > 0:
            entry_N, _ = self._entries(own, branch)
            place = int(state["next_start"]) - int(state["window_start"])
            self.carry_1C5 = own.classes.at(entry_N[place : place + 1]).copy()
