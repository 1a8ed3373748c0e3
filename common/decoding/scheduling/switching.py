"""Requests decoded in whichever of the two ways is faster for as many as there are."""

from __future__ import annotations

from common.decoding.plan import Int, Predictions, Sampling, Score, StepPlan
from common.decoding.request import Completion
from common.decoding.scheduling.arrays import RequestArrays
from common.decoding.scheduling.plain import PlainRequests
from common.decoding.scheduling.state import Admission, DecodingRequest, Observer

FEW_REQUESTS = 2  # are decoded as fast one after another as all at once; one is twice as fast
FEW_OBSERVED = 4  # are decoded one after another while all are looked at: those records say more (StepRecord)


class SwitchingRequests:
    """`state.Requests`: one after another until there are more than FEW_REQUESTS, then all at once until one is left,
    or one comes that `arrays` does not know.
    """

    def __init__(self, num_slots: int, mask_token_id: int, observer: Observer | None) -> None:
        self._plain = PlainRequests(mask_token_id, observer)
        self._arrays = RequestArrays(num_slots, mask_token_id, observer)
        self._now: PlainRequests | RequestArrays = self._plain

    @property
    def observer(self) -> Observer | None:
        return self._plain.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._plain.observer = self._arrays.observer = observer

    @property
    def active(self) -> list[DecodingRequest]:
        return self._now.active

    def add(self, admission: Admission) -> None:
        if not admission.rules.fits_arrays:
            self._move_to_plain()
        self._now.add(admission)

    def drop(self, request_id: str, now: float) -> tuple[DecodingRequest, Completion] | None:
        return self._now.drop(request_id, now)

    def num_lookaheads(self) -> Int:
        return self._now.num_lookaheads()

    def keep_lookaheads(self, count_N: Int) -> None:
        self._now.keep_lookaheads(count_N)

    def num_prompt_tokens(self) -> int:
        return self._now.num_prompt_tokens()

    def plan_step(self, sampling: Sampling) -> StepPlan:
        # Who looks at some looks on one rank alone, and all ranks have to lay rows out alike.
        is_observed = self.observer is not None and self.observer.ids is None
        count, few = len(self._now), FEW_OBSERVED if is_observed else FEW_REQUESTS
        if count <= 1:
            self._move_to_plain()
        elif count > few and self._now is self._plain and self._all_fit_arrays():
            self._move_to_arrays()
        return self._now.plan_step(sampling)

    def prepare(self) -> None:
        self._now.prepare()

    def select_winners(self, predictions: Predictions) -> Int:
        return self._now.select_winners(predictions)

    def scores(self) -> Score:
        return self._now.scores()

    def advance(self, winner_row_of_request: Int, now: float) -> list[tuple[DecodingRequest, Completion]]:
        return self._now.advance(winner_row_of_request, now)

    def newly_final(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._now.newly_final()

    def _all_fit_arrays(self) -> bool:
        return all(decoding.rules.fits_arrays for decoding in self._now.active)

    def _move_to_plain(self) -> None:
        if self._now is self._arrays:
            self._plain.take(self._arrays.give())
            self._now = self._plain

    def _move_to_arrays(self) -> None:
        if self._now is self._plain:
            self._arrays.take(self._plain.give())
            self._now = self._arrays
