"""What a mistake, a broken input or a broken model does to the main loop: a sentence, and nothing done is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from common.config import DecodeConfig
from common.decoding import (
    Capacity,
    Completion,
    GenerationRequest,
    Predictions,
    Rejection,
    Scheduler,
    StepPlan,
    decode_requests,
)
from common.processes import Mesh

DECODE = DecodeConfig(num_lookahead=1, block_size=4, max_new_tokens=8)
VOCABULARY = 50


class StubEngine:
    """Fills everything at once. spoil: changes a step's predictions before they are handed over."""

    mesh = Mesh(rank=3)
    capacity = Capacity(num_slots=2, max_model_len=100, vocab_size=VOCABULARY)

    def __init__(self, spoil: Any = None) -> None:
        self._spoil = spoil

    def forward(self, plan: StepPlan) -> Predictions:
        ones = np.ones(plan.token_T.shape, dtype=np.float32)
        predictions = Predictions.of(np.full(plan.token_T.shape, 7), ones, ones.copy())
        if self._spoil is not None:
            self._spoil(plan, predictions)
        return predictions

    def commit(self, plan: StepPlan, winner_row_of_request: np.ndarray) -> None:
        pass


def decode(requests: Iterator[GenerationRequest], engine: StubEngine) -> Iterator[Completion | Rejection]:
    scheduler = Scheduler(DECODE, mask_token_id=1, eos_token_id=2, num_slots=2)
    return decode_requests(requests, scheduler, engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("stranger", [VOCABULARY, 10**6, 2**70, -1, 3.0, True, "7", None])
def test_a_token_that_the_model_has_not_rejects_its_request_alone(stranger: Any) -> None:
    requests = [GenerationRequest("bad", (5, stranger)), GenerationRequest("good", (5, VOCABULARY - 1))]
    results = {result.id: result for result in decode(iter(requests), StubEngine())}
    assert isinstance(results["good"], Completion)
    rejected = results["bad"]
    assert isinstance(rejected, Rejection) and "is no token: the model's vocabulary has 50" in rejected.reason
    assert (rejected.token_ids, rejected.num_forwards, rejected.tokens_per_forward) == ((), 0, 0.0)


def test_what_nobody_reads_may_be_anything() -> None:
    def spoil(plan: StepPlan, predictions: Predictions) -> None:
        predictions.values_3T[:, ~plan.is_read_T] = np.nan

    (result,) = decode(iter([GenerationRequest("only", (5,))]), StubEngine(spoil))
    assert isinstance(result, Completion) and set(result.canvas_token_ids) == {7}


def test_an_input_that_raises_loses_nothing_that_was_admitted() -> None:
    def requests() -> Iterator[GenerationRequest]:
        for n in range(3):
            yield GenerationRequest(str(n), (5,))
        raise OSError("the input is gone")

    results, done = decode(requests(), StubEngine()), []
    with pytest.raises(OSError, match="the input is gone"):
        for result in results:
            done.append(result.id)
    assert sorted(done) == ["0", "1", "2"]
