"""A model without weights: what it predicts is a function of all that its attention sees, in two layers, with cached
keys as they were when they were committed. Whole numbers, so that what shares a pass changes no bit.

Positions have a habit: most of the time they are predicted alike whatever stands elsewhere, so that drafts come true.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.config import DecodeConfig
from common.decoding import (
    Completion,
    GenerationRequest,
    ModelFacts,
    Predictions,
    Sampling,
    Scheduler,
    StepPlan,
    StepRecord,
)

MASK, EOS, VOCAB = 5, 6, 40
_NUMBER = np.uint64
Canvas = list[int]


def mixed(value_X: Any) -> Any:
    """Scramble the bits of whole numbers (splitmix64)."""
    with np.errstate(over="ignore"):
        value_X = np.asarray(value_X, _NUMBER) + _NUMBER(0x9E3779B97F4A7C15)
        value_X = (value_X ^ (value_X >> _NUMBER(30))) * _NUMBER(0xBF58476D1CE4E5B9)
        value_X = (value_X ^ (value_X >> _NUMBER(27))) * _NUMBER(0x94D049BB133111EB)
    return value_X ^ (value_X >> _NUMBER(31))


class Attentive:
    """habit: of eight predictions, how many follow the habit. num_best: other tokens that are predicted too."""

    def __init__(self, seed: int, shift: int, habit: int = 6, eos_of_64: int = 1) -> None:
        self._seed, self._shift, self._habit, self._eos = seed, shift, habit, eos_of_64
        self._keys: dict[int, dict[int, tuple[int, int]]] = {}  # of each slot, both layers' by position

    def forward(self, plan: StepPlan) -> Predictions:
        """Predict what the plan reads; elsewhere such as would be noticed."""
        values_XT = np.full((3 + 2 * plan.sampling.num_best, plan.num_tokens), np.nan, np.float32)
        for row in range(plan.num_rows):
            first, count = int(plan.first_R[row]), int(plan.num_entries_R[row])
            values_XT[:, first : first + count] = self._predicted(plan, row)[1]
        values_XT[:, ~plan.is_read_T] = np.nan
        return Predictions(values_XT)

    def commit(self, plan: StepPlan, winner_N: Any) -> None:
        """Keep the winners' keys."""
        for span in plan.commits:
            (first_W, second_W), _ = self._predicted(plan, int(winner_N[span.request]))
            own = self._keys.setdefault(span.slot, {})
            for column in range(span.length):
                own[span.start + column] = int(first_W[column]), int(second_W[column])

    def read(self, canvas: Canvas, num_best: int = 0) -> Any:
        """Return what is predicted for each position of a canvas that sees all of itself: tokens, probabilities,
        confidences, and others."""
        count = len(canvas)
        entries_3T = np.array([canvas, range(count), [count] * count], np.int32)
        fields_8R = np.array([[0], [count], [count], [0], [0], [0], [0], [0]], np.int64)
        sampling = Sampling("neg_entropy", MASK, num_best=num_best)
        plan = StepPlan(entries_3T, np.ones(count, np.bool_), fields_8R, np.zeros(1, np.int64), (), sampling, False)
        return self.forward(plan).values_3T

    def _predicted(self, plan: StepPlan, row: int) -> tuple[tuple[Any, Any], Any]:
        """Return keys of both layers, and what is predicted."""
        own = slice(int(plan.first_R[row]), int(plan.first_R[row] + plan.num_entries_R[row]))
        num_keys, start, cached = int(plan.num_keys_R[row]), int(plan.start_R[row]), int(plan.cached_R[row])
        position_E = plan.position_T[own].astype(_NUMBER)
        horizon_E = plan.horizon_T[own]
        outside = [*range(start), *range(start + num_keys, cached)]
        held = self._keys.get(int(plan.slot_R[row]), {})
        cached_C2 = np.array([held[position] for position in outside], _NUMBER).reshape(-1, 2)
        is_seen_EC = np.array(outside, np.int64)[None] < np.maximum(horizon_E, start + num_keys)[:, None]
        if len(outside) and outside[-1] >= start + num_keys:  # the dual cache shows all
            is_seen_EC[:] = True
        is_seen_EW = plan.position_T[own][None, :num_keys] < horizon_E[:, None]
        with np.errstate(over="ignore"):
            first_E = mixed(plan.token_T[own].astype(_NUMBER) * _NUMBER(1009) + position_E + _NUMBER(self._seed << 20))
            seen_E = is_seen_EC.astype(_NUMBER) @ cached_C2[:, 0] + is_seen_EW.astype(_NUMBER) @ first_E[:num_keys]
            second_E = mixed(first_E + seen_E)
            seen_E = is_seen_EC.astype(_NUMBER) @ cached_C2[:, 1] + is_seen_EW.astype(_NUMBER) @ second_E[:num_keys]
        is_shift_E = np.arange(len(position_E)) >= num_keys
        target_E = position_E + _NUMBER(self._shift)
        assert not is_shift_E.any() or self._shift
        return (first_E[:num_keys], second_E[:num_keys]), self._told(plan, target_E, seen_E)

    def _told(self, plan: StepPlan, target_E: Any, seen_E: Any) -> Any:
        with np.errstate(over="ignore"):
            usual_E = mixed(target_E + _NUMBER(self._seed << 20))
            now_E = mixed(seen_E + target_E * _NUMBER(31))
        is_usual_E = now_E % _NUMBER(8) < _NUMBER(self._habit)
        source_E = np.where(is_usual_E, usual_E, now_E) >> _NUMBER(3)
        probability_E = (source_E % _NUMBER(31)).astype(np.float32) / 32 + 1 / 64
        source_E >>= _NUMBER(6)
        token_E = (source_E % _NUMBER(VOCAB - 7)).astype(np.int64) + 7
        token_E[(source_E >> _NUMBER(8)) % _NUMBER(64) < _NUMBER(self._eos)] = EOS
        told_3E = np.stack((token_E, probability_E, probability_E - 1)).astype(np.float32)
        num_best = plan.sampling.num_best
        if not num_best:
            return told_3E
        others_CE = (token_E[None] - 7 + np.arange(num_best)[:, None]) % (VOCAB - 7) + 7
        others_CE[0] = token_E
        shares_CE = probability_E[None] * 0.6 ** np.arange(num_best)[:, None]
        return np.concatenate((told_3E, others_CE, shares_CE)).astype(np.float32)


class Decoded:
    """Requests of these prompts' lengths decoded together by a model, each in a slot of its own. told: of each what was
    said to be final."""

    def __init__(self, decode: DecodeConfig, facts: ModelFacts, lengths: list[int], model: Any,
                 watches: bool = False) -> None:  # fmt: skip
        self.completions: dict[str, Completion] = {}
        self.plans: list[StepPlan] = []
        self.records: list[StepRecord] = []
        self.told: dict[str, tuple[int, ...]] = {}
        scheduler = Scheduler(
            decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=len(lengths), facts=facts,
            observer=self.records.append if watches else None,
        )  # fmt: skip
        for number, length in enumerate(lengths):
            scheduler.admit(GenerationRequest(str(number), tuple(range(7, 7 + length))))
        while scheduler.active:
            plan = scheduler.plan_step()
            self.plans.append(plan)
            winner_N = scheduler.select_winners(model.forward(plan))
            model.commit(plan, winner_N)
            self.completions |= {completion.id: completion for completion in scheduler.advance(winner_N)}
            for name, token_ids in scheduler.newly_final():
                self.told[name] = (*self.told.get(name, ()), *token_ids)

    @property
    def tokens(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]:
        """Return tokens, canvas and reason of each request."""
        return {
            name: (done.token_ids, done.canvas_token_ids, done.finish_reason) for name, done in self.completions.items()
        }

    @property
    def num_forwards(self) -> int:
        return sum(done.num_forwards for done in self.completions.values())


def decoded_as(wanted: Canvas, passes: int, seed: int, **settings: Any) -> Completion:
    """Decode one request of three tokens, with the whole canvas in each pass, to this canvas in so many passes."""
    decode = DecodeConfig(strategy="vanilla", max_new_tokens=len(wanted) - 3, stop_at_eos=False, **settings)
    (done,) = Decoded(decode, ModelFacts(0), [3], Attentive(seed, 0)).completions.values()
    assert list(done.canvas_token_ids) == wanted[3:] and done.num_forwards == passes
    return done


def filled(canvas: Canvas, told_3P: Any, threshold: float) -> Canvas:
    """Fill every mask above the threshold, or the most confident one."""
    masks = [place for place, token in enumerate(canvas) if token == MASK]
    sure = [place for place in masks if told_3P[1, place] > threshold]
    chosen = sure or sorted(masks, key=lambda place: -told_3P[2, place])[:1]
    return [int(told_3P[0, place]) if place in chosen else token for place, token in enumerate(canvas)]
