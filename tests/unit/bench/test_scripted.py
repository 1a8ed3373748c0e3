"""A scripted engine has a step fill as many tokens as it is told, by whichever entry the model predicts."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from common.bench.timed import ScriptedEngine
from common.config import DecodeConfig
from common.decoding import (
    Capacity,
    Completion,
    GenerationRequest,
    ModelFacts,
    Predictions,
    Scheduler,
    StepPlan,
    decode_requests,
)
from common.processes import Mesh

MASK = 5


class NoEngine:
    capacity = Capacity(num_slots=2, max_model_len=100)
    mesh = Mesh()

    def forward(self, plan: StepPlan) -> Predictions:
        return Predictions(np.zeros((3, plan.num_tokens), np.float32))

    def commit(self, plan: StepPlan, winner_row_of_request: Any) -> None:
        pass


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("num_lookahead", [0, 3])
def test_every_step_fills_so_many(shift: int, num_lookahead: int) -> None:
    decode = DecodeConfig(num_lookahead=num_lookahead, block_size=16, max_new_tokens=64, stop_at_eos=False)
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=None, num_slots=2, facts=ModelFacts(shift))
    engine = cast(Any, ScriptedEngine(cast(Any, NoEngine()), 3, shift=shift))
    requests = [GenerationRequest(name, (7, 8, 9)) for name in "ab"]
    for done in decode_requests(requests, scheduler, engine):
        assert isinstance(done, Completion)
        own = np.array(done.tokens_per_step) - np.array([win > 0 for win in done.winner_per_step])
        first = own[1 if shift else 0 : -1]  # the first step of a model with shift cannot predict its first mask
        assert set(first.tolist()) <= {3, 4} and np.mean(first) < 3.5, done.tokens_per_step
