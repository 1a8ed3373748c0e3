"""Handle predictions that are NaN or infinite: they end the requests that got them, and the engine only where no
request is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from common.config import DecodeConfig
from common.decoding.plan import Predictions, StepPlan
from common.decoding.request import Completion, GenerationRequest, Rejection
from common.decoding.scheduling.scheduler import Scheduler
from common.decoding.scheduling.state import DecodingRequest
from common.errors import EngineError

_PROBE_ID = "\0probe"  # no user's
_NO_NUMBERS = "the model's output is not finite"
_WEIGHTS = "weights hold NaN or infinity, or overflow in this dtype or quantization"


class ModelCheck:
    """Checks the predictions of every pass. All ranks of a replica have the same ones and decide alike.

    A client whose requests always fail must not end the engine, and an engine whose predictions are NaN for everybody
    must stop. So where a pass fails all of its requests, the next one has a probe in it, a request of the engine's own:
    one token, greedy. If that fails too, the model is to blame.
    """

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._probe: GenerationRequest | None = None  # in the pass under way
        self._failed: DecodeConfig | None = None  # settings of a request of a pass that has failed all

    def contained(self, predictions: Predictions, plan: StepPlan, step: int) -> Predictions:
        """Return the predictions, with zeros for requests that have NaN or infinity where the scheduler reads: NaN
        would win every comparison unseen. These requests end with this pass.

        Raises EngineError naming rank and step where the probe is one of them.
        """
        if isfinite(predictions.values_3T.sum()):  # of values that nobody reads too: a sum costs a step the least
            return predictions
        is_bad_T = ~np.isfinite(predictions.values_3T).all(axis=0) & plan.is_read_T
        if not is_bad_T.any():
            return predictions
        request_T = plan.request_R.repeat(plan.num_entries_R)
        index_F, active = np.unique(request_T[is_bad_T]), self._scheduler.active
        failed = [active[index] for index in index_F.tolist()]
        for decoding in failed:
            if decoding.request is self._probe:
                raise EngineError(
                    f"rank {self._rank}, step {step}: {_NO_NUMBERS}, not even for a prompt of one token: its "
                    f"{_WEIGHTS}; choose another of these, or get the checkpoint anew"
                )
            self._scheduler.fail(decoding, _reason(decoding, failed))
        if len(failed) == len(active):
            self._failed = failed[0].rules.decode
        values_3T = np.where(np.isin(request_T, index_F), np.float32(0), predictions.values_3T)
        return predictions._replace(values_3T=values_3T)

    def settled(self, results: list[Completion | Rejection]) -> list[Completion | Rejection]:
        """Return the results of a pass without the probe's, and admit a new probe where one is needed."""
        if self._probe is not None:
            self._scheduler.drop(_PROBE_ID)
            self._probe = None
            results = [result for result in results if result.id != _PROBE_ID]
        if self._failed is not None:
            self._probe = GenerationRequest(_PROBE_ID, (0,), self._failed.changed({"temperature": 0.0}))
            self._failed = None
            self._scheduler.admit(
                self._probe
            )  # there is room: all slots are free, and it is no longer than another was
        return results


def _reason(decoding: DecodingRequest, failed: Sequence[DecodingRequest]) -> str:
    """Return the sentence for one of the requests that a pass has failed. The weights are to blame if one of these is
    greedy."""
    if not all(one.rules.is_sampled for one in failed):
        return f"{_NO_NUMBERS} for this request: its {_WEIGHTS}; if other prompts fail too, choose another of these"
    temperature, top_p, top_k = decoding.rules.sampling
    return (
        f"{_NO_NUMBERS} for this request, drawn with temperature {temperature}, top_p {top_p} and top_k {top_k:.0f}: "
        f"send it with temperature 0; if that fails too, the model's {_WEIGHTS}"
    )
