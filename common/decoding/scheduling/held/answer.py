"""Answers that are held to a format: what a pass predicts for them is replaced by what their automaton leaves possible.

Before rows are scored, every mask of every row gets its best possible token, by the anchor's canvas; once there is a
winner, every mask of it gets its token of one joint solution. So fills, forced fills, tokens that begin a block and
lookaheads are parts of one accepted canvas, and the loops that write them know nothing of formats. Blocks that are not
opened are masks of the canvas too: an answer always fits into what is left.

Probabilities and confidences are those among the tokens that are possible at the position.

Shapes: Q states, C classes, W positions of the part that is solved, N positions that a row predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.constraints import MASK, NEVER, Automaton, Lattice, best_path, drawn_path, possible
from common.decoding.plan import Bool, ClassField, ClassStatistics, Float, Int, Score
from common.decoding.request import GenerationRequest
from common.decoding.scheduling.rules import Rules
from common.decoding.scheduling.tables import Tables, positions_of
from common.policies import Draws

_STREAM = 2  # of random numbers: others are the scores' and the spawn rules'


class Pass(NamedTuple):
    """A request's part of the pass that is being finished. classes: of its automaton."""

    tables: Tables
    slot: int
    values_3T: Float
    fields_8R: Int
    classes: ClassStatistics

    @property
    def state(self) -> Any:
        return self.tables.states[self.slot]


class _Part(NamedTuple):
    """The positions [begin, end) that are solved, and what they may become. state: before them."""

    begin: int
    state: int
    class_W: Int
    lattice: Lattice


@dataclass(slots=True)
class Held:
    """The format of a request's answer. automaton: of canvases (`Automaton.closed`). begin, end: the positions that
    count. is_tail_free: anything may follow an end token, as in models that are not trained to fill it with these.
    takes_entropy: the confidence is the negative entropy, else the probability.

    carry_C5: statistics of the first position after the cache, kept from the step that committed the one before.
    """

    automaton: Automaton
    begin: int
    end: int
    noise_key: int
    is_sampled: bool
    is_tail_free: bool
    takes_entropy: bool
    carry_C5: Float | None = None

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
        part = self._part(own, (), int(state["widest_end"]) + bool(state["predicts_next"]))
        if part is None:
            return False
        is_possible_WC = possible(self.automaton, part.lattice)
        for branch in range(int(state["num_rows"])):
            self._write(own, branch, part, is_possible_WC, None)
        return True

    def solve(self, own: Pass, winner: int) -> bool:
        """Write the winning row's predictions: its tokens of one solution. Returns False where there is none."""
        state = own.state
        branch = winner - int(state["first_row"])
        made = own.tables.branches_K[own.slot, branch]
        fills = [
            (int(own.tables.fills_KF[own.slot, branch, place]["position"]),
             int(own.tables.fills_KF[own.slot, branch, place]["token"]))
            for place in range(int(made["num_fills"]))
        ]  # fmt: skip
        end = int(state["window_end"]) + 1 if state["predicts_next"] else int(made["masks_end"])
        part = self._part(own, fills, end)
        if part is None:
            return False
        if len(part.class_W):
            path_W = self._path(own, branch, part)
            self._write(own, branch, part, possible(self.automaton, part.lattice), path_W)
        self._keep_carry(own, branch)
        return True

    def is_complete(self, tables: Tables, slot: int) -> bool:
        """Return whether the answer stands: its canvas is full, or nothing but an end token may follow what it has."""
        token_P, is_masked_P = positions_of(tables, slot)
        first = self._first_mask(is_masked_P)
        state = self.automaton.after(
            self.automaton.start, self.automaton.class_V[token_P[self.begin : first]].astype(np.int64)
        )
        if first >= self.end or state == NEVER:
            return state != NEVER and bool(self.automaton.is_final_Q[state])
        only = np.flatnonzero(self.automaton.next_QC[state] >= 0)
        return bool(self.automaton.is_final_Q[state]) and only.tolist() == [self.automaton.end_class]

    def _first_mask(self, is_masked_P: Bool) -> int:
        masks = is_masked_P[self.begin : self.end].nonzero()[0]
        return self.begin + int(masks[0]) if len(masks) else self.end

    def _part(self, own: Pass, fills: Any, end: int) -> _Part | None:
        """Return the part from the first mask to the last position that is predicted or filled. None where it has no
        solution."""
        token_P, is_masked_P = positions_of(own.tables, own.slot)
        class_P = np.where(is_masked_P, MASK, self.automaton.class_V[token_P]).astype(np.int64)
        for position, token in fills:
            class_P[position] = self.automaton.class_V[token]
        class_P = class_P[: self.end]
        masks = (class_P[self.begin :] == MASK).nonzero()[0]
        begin = self.begin + int(masks[0]) if len(masks) else self.end
        filled = (class_P != MASK).nonzero()[0]
        end = min(max(end, begin, int(filled[-1]) + 1), self.end)
        state = self.automaton.after(self.automaton.start, class_P[self.begin : begin])
        if state == NEVER:
            return None
        class_W = class_P[begin:end]
        lattice = self.automaton.lattice(state, class_W, self.automaton.may_end(self.end - end))
        return None if lattice is None else _Part(begin, state, class_W, lattice)

    def _path(self, own: Pass, branch: int, part: _Part) -> Int:
        weight_WC = np.zeros((len(part.class_W), self.automaton.num_classes))
        place_N, values_NC5 = self._predicted(own, branch, part)[:2]
        weight_NC = values_NC5[..., ClassField.WEIGHT].astype(np.float64)
        total = ClassField.WEIGHT if self.is_sampled else ClassField.MASS
        weight_WC[place_N] = weight_NC - _log_sum(values_NC5[..., total].astype(np.float64))[:, None]
        if not self.is_sampled:
            return best_path(self.automaton, part.lattice, weight_WC, part.state, is_tail_free=self.is_tail_free)
        draws = Draws(self.noise_key, int(own.state["num_forwards"]), _STREAM).generator()
        return drawn_path(self.automaton, part.lattice, weight_WC, part.state, draws, is_tail_free=self.is_tail_free)

    def _predicted(self, own: Pass, branch: int, part: _Part) -> tuple[Int, Float, Int]:
        """Return the masks of the part that the row predicts: their places in it, their statistics, and the entries
        that predict them; NEVER: the carry does."""
        start, entry_N = _entries(own, branch)
        position_N = start + np.arange(len(entry_N))
        place_N = position_N - part.begin
        is_in_N = (place_N >= 0) & (place_N < len(part.class_W))
        is_in_N[is_in_N] = part.class_W[place_N[is_in_N]] == MASK
        if len(entry_N) and entry_N[0] == NEVER and self.carry_C5 is None:
            is_in_N[0] = False
        place_N, entry_N = place_N[is_in_N], entry_N[is_in_N]
        is_carry_N = entry_N == NEVER
        is_known_N = np.isin(entry_N, own.classes.entry_X) | is_carry_N
        place_N, entry_N, is_carry_N = place_N[is_known_N], entry_N[is_known_N], is_carry_N[is_known_N]
        values_NC5 = np.empty((len(entry_N), self.automaton.num_classes, len(ClassField)), np.float32)
        values_NC5[~is_carry_N] = own.classes.at(entry_N[~is_carry_N])
        if is_carry_N.any():
            values_NC5[is_carry_N] = self.carry_C5
        return place_N, values_NC5, entry_N

    def _write(self, own: Pass, branch: int, part: _Part, is_possible_WC: Bool, path_W: Int | None) -> None:
        """Write what the row predicts: tokens of the path's classes; without a path of the most probable classes."""
        place_N, values_NC5, entry_N = self._predicted(own, branch, part)
        if not len(place_N):
            return
        class_N = None if path_W is None else path_W[place_N]
        told_3N = self._told(values_NC5, is_possible_WC[place_N], class_N)
        is_carry_N = entry_N == NEVER
        own.values_3T[:3, entry_N[~is_carry_N]] = told_3N[:, ~is_carry_N]
        if is_carry_N.any():
            state = own.state
            state["carry_token"], state["carry_probability"], state["carry_confidence"] = told_3N[:, 0].tolist()

    def _told(self, values_NC5: Float, is_possible_NC: Bool, class_N: Int | None) -> Score:
        """[3, N]: token, probability and confidence among the possible tokens."""
        masked_NC5 = np.where(is_possible_NC[..., None], values_NC5, -np.inf).astype(np.float64)
        if class_N is None:
            class_N = masked_NC5[..., ClassField.WEIGHT].argmax(axis=1)
        taken_N5 = np.take_along_axis(values_NC5, class_N[:, None, None], axis=1)[:, 0].astype(np.float64)
        mass_NC = masked_NC5[..., ClassField.MASS]
        total_N = _log_sum(mass_NC)
        probability_N = np.exp(np.minimum(taken_N5[:, ClassField.LOGIT] - total_N, 0.0))
        confidence_N = probability_N
        if self.takes_entropy:
            mean_NC = np.where(is_possible_NC, values_NC5[..., ClassField.MEAN], 0.0)
            confidence_N = np.minimum((np.exp(mass_NC - total_N[:, None]) * mean_NC).sum(axis=1) - total_N, 0.0)
        return np.stack((taken_N5[:, ClassField.TOKEN], probability_N, confidence_N))

    def _keep_carry(self, own: Pass, branch: int) -> None:
        """Keep what the winner predicts for the next window's first position (`planning.carries`)."""
        state, settings = own.state, own.tables.settings[own.slot]
        if state["commit_length"] > 0 and state["keeps_carry"] and not settings["is_fresh"] and state["shift"] > 0:
            start, entry_N = _entries(own, branch)
            entry_1 = entry_N[int(state["next_start"]) - start :][:1]
            self.carry_C5 = own.classes.at(entry_1)[0].copy()


def _entries(own: Pass, branch: int) -> tuple[int, Int]:
    """Return a row's first position, and the entries that predict it and those after it, as `scoring.align_row` lays
    them out; NEVER: the carry does."""
    state = own.state
    row, shift = int(state["first_row"]) + branch, int(state["shift"])
    first, num_keys, start = int(own.fields_8R[0, row]), int(own.fields_8R[2, row]), int(state["window_start"])
    entry_N = np.arange(num_keys + shift) + first - shift
    entry_N[:shift] = NEVER
    count = int(state["num_shift_entries"])
    column_B = own.tables.shift_positions_B[own.slot, :count] - start
    is_own_B = column_B < len(entry_N)  # not of a block that another row has opened
    entry_N[column_B[is_own_B]] = (first + num_keys + np.arange(count))[is_own_B]
    return start, entry_N


def _log_sum(value_NC: Score) -> Score:
    top_N1 = value_NC.max(axis=1, keepdims=True)
    total_N: Score = top_N1[:, 0] + np.log(np.exp(value_NC - top_N1).sum(axis=1))
    return total_N
