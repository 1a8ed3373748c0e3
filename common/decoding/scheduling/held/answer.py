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
from typing import Any, NamedTuple

import numpy as np

from common.config import DecodeConfig
from common.constraints import NEVER, Automaton, Recent
from common.decoding.plan import ClassField, ClassStatistics, Float, Int
from common.decoding.request import GenerationRequest
from common.decoding.scheduling.held.loops import (
    Given,
    Part,
    Workspace,
    find_entries,
    find_part,
    look,
    solve,
    stands,
    write_best,
)
from common.decoding.scheduling.rules import Rules
from common.decoding.scheduling.tables import Parts, Tables, positions_of
from common.policies import Draws

_STREAM = 2  # of random numbers: others are the scores' and the spawn rules'


_NO_CARRY = np.empty((0, 1, len(ClassField)), np.float32)
_NO_PATH, _NO_DRAWS = np.empty(0, np.int32), np.empty(0)
_MOST_SPACE_BYTES = 64 << 20  # of a thread, of which the pages that loops write to are taken


class Workspaces:
    """Memory that a thread's loops write into, by automaton."""

    def __init__(self) -> None:
        self._spaces: Recent[str, Workspace] = Recent(_MOST_SPACE_BYTES)

    def of(self, automaton: Automaton, width: int) -> Workspace:
        space = self._spaces.get(automaton.key)
        if space is None or len(space.path_W) < width:
            width, num_states, num_sets = 2 * width, automaton.num_states, len(automaton.graph.first_S1) - 1
            space = Workspace(
                np.empty((width, automaton.num_classes)), np.empty(width + 1), np.empty((2, num_states)),
                np.empty((2, num_states), np.int32), np.empty(num_sets), np.empty(num_sets, np.int32),
                np.empty((width, num_states), np.int32), np.empty((width + 1, num_states)), np.empty(width, np.int32),
            )  # fmt: skip
            self._spaces.keep(automaton.key, space, sum(array.nbytes for array in space))
        return space


class Pass(NamedTuple):
    """A request's part of the pass that is being finished. parts: of tables. classes: of its automaton."""

    tables: Tables
    parts: Parts
    slot: int
    values_3T: Float
    fields_8R: Int
    classes: ClassStatistics

    @property
    def state(self) -> Any:
        return self.tables.states[self.slot]

    def entries(self) -> Int:
        """Return memory for entries of the pass."""
        return np.empty(self.values_3T.shape[1] + 1, np.int64)


@dataclass(slots=True)
class Held:
    """The format of a request's answer. automaton: of canvases (`Automaton.closed`). begin, end: the positions that
    count. is_tail_free: anything may follow an end token, as in models that are not trained to fill it with these.
    takes_entropy: the confidence is the negative entropy, else the probability.

    options, option_logprobs: as in GenerationRequest and Completion. bias_C5: what is added to statistics of a pass;
    None: nothing.
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
    options: tuple[tuple[int, ...], ...] = ()
    option_logprobs: tuple[float, ...] | None = None
    bias_C5: Float | None = None
    carry_1C5: Float = field(default_factory=lambda: _NO_CARRY)
    _anchor: Part | None = None  # of the pass

    @classmethod
    def of(cls, automaton: Automaton, request: GenerationRequest, rules: Rules, noise_key: int) -> Held:
        """Make the state of a request that is held to an automaton, which the rules' end tokens close."""
        decode, begin = rules.decode, len(request.prompt)
        most = decode.max_new_tokens if decode.strategy.is_from_zero else rules.max_blocks * rules.block_size
        most = most if request.max_tokens is None else min(request.max_tokens, most)
        return cls(
            automaton, begin, begin + most, noise_key, decode.temperature > 0, decode.strategy.is_from_zero,
            decode.sampling_strategy == "neg_entropy", request.options, bias_C5=_bias(automaton, request, decode),
        )  # fmt: skip

    def biased(self, classes: ClassStatistics) -> ClassStatistics:
        """Return the statistics of logits that the request's bias was added to."""
        return classes if self.bias_C5 is None else classes._replace(values_XC5=classes.values_XC5 + self.bias_C5)

    def look_ahead(self, tables: Tables, parts: Parts, slot: int) -> None:
        """Find what the anchor's canvas leaves possible, which needs no prediction."""
        is_alone = tables.states[slot]["num_rows"] == 1
        reach = self._reach_of_row(tables, slot, 0) if is_alone else self._reach_of_all(tables, slot)
        self._anchor = self._part(parts, slot, reach, NEVER)

    def score_ready(self, own: Pass) -> bool:
        """Write each row's predictions by what the anchor leaves possible. Returns False where nothing is."""
        part, reach = self._anchor, self._reach_of_all(own.tables, own.slot)
        if part is None or part.reach != reach:
            part = self._anchor = self._part(own.parts, own.slot, reach, NEVER)
        if part is None:
            return False
        entry_N = own.entries()
        for branch in range(int(own.state["num_rows"])):
            write_best(
                own.parts, own.slot, branch, own.fields_8R, part, self._given(own), self.takes_entropy, entry_N,
                _NO_PATH, own.values_3T,
            )  # fmt: skip
        return True

    def solve(self, own: Pass, winner: int, spaces: Workspaces) -> bool:
        """Write the winning row's predictions: its tokens of one solution. Returns False where there is none."""
        branch = winner - int(own.state["first_row"])
        reach = self._reach_of_row(own.tables, own.slot, branch)
        part, self._anchor = self._anchor, None
        if part is None or part.reach != reach or own.tables.branches_K[own.slot, branch]["num_fills"]:
            part = self._part(own.parts, own.slot, reach, branch)
        if part is None:
            return False
        if self.options and self.option_logprobs is None:
            self.option_logprobs = self._judged(own, branch)
        if part.width:
            self._solve(own, part, branch, spaces.of(self.automaton, part.width))
        self._keep_carry(own, branch)
        return True

    def is_complete(self, tables: Tables, slot: int) -> bool:
        """Return whether the answer stands: its canvas is full, or nothing but an end token may follow what it has.
        False where a full canvas holds a text that was cut."""
        own = self.automaton
        return own.is_whole_when_full and stands(
            *positions_of(tables, slot), self.begin, self.end, own.graph, own.start, own.is_final_Q, own.end_class
        )

    def _reach_of_all(self, tables: Tables, slot: int) -> int:
        state = tables.states[slot]
        return int(state["widest_end"]) + bool(state["predicts_next"])

    def _reach_of_row(self, tables: Tables, slot: int, branch: int) -> int:
        state = tables.states[slot]
        if state["predicts_next"]:
            return int(state["window_end"]) + 1
        return int(tables.branches_K[slot, branch]["masks_end"])

    def _part(self, parts: Parts, slot: int, reach: int, branch: int) -> Part | None:
        """Return the part from the first mask to the last position that is predicted or filled. None where it has no
        solution."""
        automaton = self.automaton
        graph = automaton.graph
        class_P = np.empty(self.end - self.begin, np.int32)
        first, width, state = find_part(
            parts, slot, graph, automaton.start, self.begin, self.end, reach, branch, class_P
        )
        part = Part(
            self.begin + first, width, state, reach, class_P[first:],
            np.empty((width + 1, automaton.num_states), np.bool_), np.empty((width, automaton.num_classes), np.bool_),
        )  # fmt: skip
        num_left = self.end - part.begin - width
        if not look(graph, state, part.class_W, width, num_left, part.is_alive_WQ, part.is_possible_WC):
            return None
        return part

    def _given(self, own: Pass) -> Given:
        return Given(own.classes.entry_X, own.classes.values_XC5, self.carry_1C5)

    def _solve(self, own: Pass, part: Part, branch: int, space: Workspace) -> None:
        uniform_W = _NO_DRAWS
        if self.is_sampled:
            number = int(own.state["num_forwards"] + own.state["num_skipped"])
            uniform_W = Draws(self.noise_key, number, _STREAM).generator().random(part.width)
        solve(
            own.parts, own.slot, branch, own.fields_8R, self.automaton.graph,
            self.automaton.end if self.is_tail_free else NEVER, part, self._given(own), uniform_W,
            self.is_sampled and self.is_tail_free, self.takes_entropy, own.entries(), space, own.values_3T,
        )  # fmt: skip

    def _judged(self, own: Pass, branch: int) -> tuple[float, ...] | None:
        """Return `option_logprobs` by this pass, in which all of the answer is masked; None where it reads nothing."""
        if not len(own.classes.entry_X):
            return None
        entry_N, first = own.entries(), self.begin - int(own.state["window_start"])
        count = find_entries(own.parts, own.slot, branch, own.fields_8R, entry_N)
        entry_P = entry_N[first : min(count, first + self.end - self.begin)]
        entry_X, values_XC5 = own.classes.entry_X, own.classes.values_XC5
        index_P = np.minimum(entry_X.searchsorted(entry_P), len(entry_X) - 1)
        is_told_P = entry_X[index_P] == entry_P
        num_told = len(entry_P) if is_told_P.all() else int(is_told_P.argmin())
        mass_PC = values_XC5[index_P[:num_told], :, ClassField.MASS].astype(np.float64)
        logprob_PC = mass_PC - np.logaddexp.reduce(mass_PC, axis=1, keepdims=True)
        found = []
        for option in self.options:  # of as many tokens as there is room for: no end token has to follow
            class_W = [*self.automaton.class_V[list(option)], self.automaton.end_class][: self.end - self.begin]
            if len(class_W) > num_told:
                return ()
            found.append(float(logprob_PC[np.arange(len(class_W)), class_W].sum()))
        return tuple(found)

    def _keep_carry(self, own: Pass, branch: int) -> None:
        """Keep what the winner predicts for the next window's first position (`planning.carries`)."""
        state = own.state
        if (
            state["commit_length"] > 0 and state["keeps_carry"] and state["shift"] > 0
            and not own.tables.settings[own.slot]["is_fresh"]
        ):  # fmt: skip
            entry_N = own.entries()
            find_entries(own.parts, own.slot, branch, own.fields_8R, entry_N)
            place = int(state["next_start"]) - int(state["window_start"])
            self.carry_1C5 = own.classes.at(entry_N[place : place + 1]).copy()


def _bias(automaton: Automaton, request: GenerationRequest, decode: DecodeConfig) -> Float | None:
    """Return `Held.bias_C5`: tokens of a class have the same bias, so sums and means of logits move by it."""
    if not request.logit_bias:
        return None
    token_N, bias_N = np.array(request.logit_bias).T
    bias_C5 = np.zeros((automaton.num_classes, len(ClassField)), np.float32)
    bias_C5[automaton.class_V[token_N.astype(np.int64)], 1:] = bias_N[:, None]
    if decode.temperature > 0:
        is_tempered = decode.temperature_acts_on == "draw_and_confidence"
        bias_C5[:, slice(None) if is_tempered else ClassField.WEIGHT] /= decode.temperature
    return bias_C5
