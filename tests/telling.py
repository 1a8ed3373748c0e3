"""Decode requests that ask for log probabilities, and look at each against the pass that it is said to come from."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import (
    Completion,
    GenerationRequest,
    Int,
    Logprobs,
    Predictions,
    Scheduler,
    StepPlan,
    StepRecord,
    WrappedEngine,
    decode_requests,
)
from common.platforms import build_engine
from common.runtime import facts_of
from tests.distributed.strategies_worker import CASES, MASK, MODELS, PROMPTS, REVISING, SHARED

MOVES = ("llada2_2/model_a", {"strategy": {"name": "levenshtein", "edit_threshold": 0.0}, "block_size": 32})
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # A model that predicts a position from the one before it: by what a commit carries over, or by shift entries.
    "dream stale": ("../golden/model_a", {"block_size": 8, "skip_threshold": 0.95}),
    "dream fresh": ("../golden/model_a", {"block_size": 16, "window_attention": "block_causal", "shift_row": "fresh"}),
    **{name: case for name, case in CASES.items() if name not in REVISING},
    # One whose last layer routes blocks of positions together.
    "llada2_2": ("llada2_2/model_a", {"strategy": {"name": "block_diffusion", "commit": "separate"}, "block_size": 32}),
}


class Recomputing(WrappedEngine):
    """Holds what the engine tells against a softmax over the logits that its head gave in that pass.

    furthest: the largest difference. num_asked: of how many predictions it was asked.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.furthest, self.num_asked = 0.0, 0
        self._logits_MV = self._last_MV = torch.zeros(0)
        engine.model.lm_head.register_forward_hook(self._note)

    def _note(self, *given: Any) -> None:
        self._last_MV = given[-1].detach().float().clone()

    def answer(self, plan: StepPlan, predictions: Predictions) -> Predictions:
        self._logits_MV = self._last_MV
        return predictions

    def logprobs(self, plan: StepPlan, entry_F: Int, token_F: Int, num_top: int) -> Logprobs:
        told = super().logprobs(plan, entry_F, token_F, num_top)
        place_F = cast("Any", self.engine)._entries_of[0].searchsorted(entry_F)  # more than are read, by blocks
        logits_FV = self._logits_MV[place_F]
        logits_FV[:, plan.sampling.mask_token_id] = -torch.inf
        wanted_FV = logits_FV.double().log_softmax(-1)
        own_F = wanted_FV.gather(1, torch.from_numpy(token_F)[:, None])[:, 0]
        best_FC = wanted_FV.topk(num_top).values
        of_best_FC = wanted_FV.gather(1, torch.from_numpy(told.top_token_FC))
        for found, wanted in (
            (told.logprob_F, own_F), (told.top_logprob_FC, best_FC), (told.top_logprob_FC, of_best_FC)
        ):  # fmt: skip
            self.furthest = max(self.furthest, float(np.abs(found - wanted.numpy()).max(initial=0.0)))
        self.num_asked += len(entry_F)
        return told


class Decoded:
    """completions by id; records of the steps of each. engine: what it was asked."""

    def __init__(
        self, profile: DeviceProfile, name: str, k: int, temperature: float, num_logprobs: int | None = 2,
        *, is_watched: bool = False, engine: Any = None,
    ) -> None:  # fmt: skip
        model, own = FAMILIES.get(name, MOVES)
        config = load_model_config(MODELS / model)
        decode = DecodeConfig.model_validate({**SHARED, **own, "num_lookahead": k, "temperature": temperature})
        run = RunConfig(model=str(MODELS / model), decode=decode, max_num_requests=2)
        self.engine = engine or build_engine(profile, run)
        self.records: dict[str, list[StepRecord]] = {"0": [], "1": []}
        scheduler = Scheduler(
            decode, mask_token_id=MASK if config.mask_token_id is None else config.mask_token_id, eos_token_id=None,
            num_slots=2, facts=facts_of(config),
            observer=(lambda record: self.records[record.request_id].append(record)) if is_watched else None,
        )  # fmt: skip
        requests = [
            GenerationRequest(str(n), tuple(token % 300 for token in prompt), num_logprobs=num_logprobs)
            for n, prompt in enumerate(PROMPTS)
        ]
        results = list(decode_requests(iter(requests), scheduler, self.engine))
        self.completions = {done.id: done for done in results if isinstance(done, Completion)}

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        return {id: (done.num_forwards, *done.canvas_token_ids) for id, done in self.completions.items()}


def probability_and_pass(done: Completion, records: list[StepRecord]) -> dict[int, tuple[float, int, bool]]:
    """What the steps' records say of each token of the answer: its probability, the pass, and whether the record is of
    the pass that predicted it (else of a later one)."""
    found: dict[int, tuple[float, int, bool]] = {}
    for number, record in enumerate(records, start=1):
        if not record.winner_is_anchor:
            before = records[number - 2]
            winner = record.branch_scores.index(max(record.branch_scores))
            for position, token in before.lookahead[winner].fills:
                candidate = before.candidates.get(position)
                if candidate is not None and candidate.token == token:
                    found[position - done.prompt_length] = candidate.probability, number - 1, position != before.start
        for position, token in {**record.filled, **record.edited}.items():
            candidate = record.candidates[position]
            assert candidate.token == token
            found[position - done.prompt_length] = candidate.probability, number, position != record.start
    return found
