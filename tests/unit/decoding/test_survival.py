"""Canvases that are cut to the length their first pass lets expect."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import (
    Capacity,
    Completion,
    GenerationRequest,
    Int,
    Logprobs,
    ModelFacts,
    Predictions,
    Rejection,
    Scheduler,
    StepPlan,
    decode_requests,
)
from common.decoding.scheduling.strategies.survival import expected_length
from common.platforms import build_engine
from common.processes import Mesh
from tests.telling import MASK, MODELS, Recomputing

ENDS, BLOCK, CANVAS = (2, 3), 4, 24


def expected(hazards: list[float]) -> float:
    """arXiv 2608.26374: the sum over i of the product over j < i of (1 - h_j)."""
    return sum(math.prod(1 - h for h in hazards[:i]) for i in range(len(hazards)))


class EndingEngine:
    """Each prompt says where an end is probable: its first token is that position of the canvas, its second the
    probability in percent, in equal parts of both end tokens."""

    shift = 0
    capacity = Capacity(num_slots=4, max_model_len=100, vocab_size=101, gives_logprobs=True)

    def __init__(self) -> None:
        self.mesh = Mesh()

    def forward(self, plan: StepPlan) -> Predictions:
        values_3T = np.full(plan.entries_3T.shape, 0.9, dtype=np.float32)
        values_3T[0] = 7
        return Predictions(values_3T)

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        pass

    def logprobs(self, plan: StepPlan, entry_F: Int, token_F: Int, num_top: int) -> Logprobs:
        assert plan.is_read_T[entry_F].all() and {*token_F.tolist()} == {*ENDS}
        row_F = np.searchsorted(plan.first_R, entry_F, side="right") - 1
        first_F = plan.first_R[row_F]
        place, percent, length = (plan.token_T[first_F + n] for n in range(3))
        position_F = plan.position_T[entry_F] + self.shift - length
        share_F = np.where(position_F == place, percent / 200, 1e-9)
        empty = np.zeros((len(entry_F), 0))
        return Logprobs(np.log(share_F), empty.astype(np.int64), empty)


def decoded(shift: int, margin: int | None, prompts: list[list[int]], cache: str, **settings: Any) -> list[Any]:
    strategy = {"name": "fast_dllm", "cache": cache, "survival_margin": margin}
    decode = DecodeConfig.model_validate(
        {"block_size": BLOCK, "max_new_tokens": CANVAS, "strategy": strategy, "skip_threshold": 0.5, **settings}
    )
    facts = ModelFacts(shift=shift, more_end_token_ids=ENDS[1:])
    scheduler = Scheduler(decode, mask_token_id=1, eos_token_id=ENDS[0], num_slots=4, facts=facts)
    engine = EndingEngine()
    engine.shift = shift
    requests = [GenerationRequest(str(n), tuple(prompt)) for n, prompt in enumerate(prompts)]
    return sorted(decode_requests(iter(requests), scheduler, engine), key=lambda done: done.id)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", ["prefix", "dual", "none"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_canvas_is_cut_to_the_expected_length(shift: int, cache: str, k: int) -> None:
    asked = [(place, percent) for place in (0, 3, 10, 23) for percent in (50, 100)]
    prompts = [[place, percent, 5 + n, *[9] * (2 + n)] for n, (place, percent) in enumerate(asked)]
    for margin in (0, 3, 40):
        found = decoded(shift, margin, prompts, cache, num_lookahead=k)
        for done, (place, percent) in zip(found, asked, strict=True):
            length = expected([percent / 100 if n == place else 0.0 for n in range(CANVAS)])
            wanted = min(CANVAS, math.ceil(round(length + margin, 6) / BLOCK) * BLOCK)
            assert (len(done.canvas_token_ids), done.finish_reason) == (wanted, "length")
            assert done.canvas_token_ids == (7,) * wanted
        alone = [*decoded(shift, margin, [prompts[4]], cache, num_lookahead=k)]
        assert alone[0].canvas_token_ids == found[4].canvas_token_ids
    whole = decoded(shift, None, prompts, cache, num_lookahead=k)
    assert {len(done.canvas_token_ids) for done in whole} == {CANVAS}


def test_the_length_is_the_published_sum() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 40):
        hazard_CE = rng.random((count, 2)) / rng.choice([1, 8, 64])
        hazards = np.minimum(hazard_CE.sum(axis=1), 1).tolist()
        assert expected_length(np.log(hazard_CE)) == pytest.approx(expected(hazards), rel=1e-12)
    assert expected_length(np.full((6, 1), -np.inf)) == 6


class First(Recomputing):
    """Keeps the logits of its first pass. end: an end token, made probable at some positions."""

    def __init__(self, engine: Any, end: int) -> None:
        super().__init__(engine)
        engine.model.lm_head.weight.data[end] *= 12
        self.logits: list[torch.Tensor] = []

    def answer(self, plan: StepPlan, predictions: Predictions) -> Predictions:
        self.logits.append(self._last_MV)
        return super().answer(plan, predictions)


@pytest.mark.parametrize("end", [17, 40, 100])
@pytest.mark.parametrize(("model", "shift"), [("llada/model_a", 0), ("../golden/model_a", 1)])
def test_the_models_own_probabilities_decide(cpu: DeviceProfile, model: str, shift: int, end: int) -> None:
    folder, own_mask = str(MODELS / model), load_model_config(MODELS / model).mask_token_id
    decode = DecodeConfig.model_validate(
        {
            "block_size": 8, "max_new_tokens": 48, "skip_threshold": 0.3, "sampling_strategy": "default",
            "eos_token_id": end, "strategy": {"name": "fast_dllm", "survival_margin": 0},
        }
    )  # fmt: skip
    engine = First(build_engine(cpu, RunConfig(model=folder, decode=decode, max_num_requests=1)), end)
    mask = MASK if own_mask is None else own_mask
    facts = ModelFacts(shift=shift)
    scheduler = Scheduler(decode, mask_token_id=mask, eos_token_id=None, num_slots=1, facts=facts)
    (done,) = decode_requests(iter([GenerationRequest("a", tuple(range(5, 21)))]), scheduler, engine)
    assert isinstance(done, Completion)
    logits_CV = engine.logits[0][:48].double()
    logits_CV[:, mask] = -torch.inf
    length = expected(logits_CV.softmax(-1)[:, end].tolist())
    assert len(done.canvas_token_ids) == math.ceil(length / 8) * 8


def test_an_engine_that_tells_no_probabilities_refuses() -> None:
    class Silent(EndingEngine):
        capacity = replace(EndingEngine.capacity, gives_logprobs=False)

    decode = DecodeConfig.model_validate(
        {"block_size": BLOCK, "max_new_tokens": CANVAS, "strategy": {"name": "fast_dllm", "survival_margin": 0}}
    )
    scheduler = Scheduler(decode, mask_token_id=1, eos_token_id=2, num_slots=1)
    (found,) = decode_requests(iter([GenerationRequest("a", (4, 5))]), scheduler, Silent())
    assert isinstance(found, Rejection) and "survival_margin: this engine" in found.reason
