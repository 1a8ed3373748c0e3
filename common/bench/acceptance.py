"""Engines that answer for another model: step times are the wrapped engine's, predictions come from a record or a rule.

A model of random weights accepts no tokens, so its tokens per second say nothing. Here a large model's passes are run
and timed as they are, and the scheduler is then given what a trained model predicted in the same step of the same
request (`ReplayEngine`, from a file of `RecordingEngine`), or a fixed number of confident tokens a step
(`ScriptedEngine`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from common.checkpoint import ModelConfig
from common.config import DecodeConfig, renewed
from common.decoding import Engine, GenerationRequest, Predictions, Scheduler, StepPlan, WrappedEngine, decode_requests
from common.errors import ConfigError, EngineError, first_line

ACCEPTED, UNSURE = 0.99, 0.5


class ScriptedEngine(WrappedEngine):
    """In every row the first `num_accepted` masks are predicted with confidence, the others without. shift: as in
    ModelFacts, by which entry a position is predicted."""

    def __init__(self, engine: Engine, num_accepted: int, token: int = 1, shift: int = 1) -> None:
        super().__init__(engine)
        self._shift = shift
        self._num_accepted = num_accepted
        self._token = token

    def answer(self, plan: StepPlan, predictions: Predictions) -> Predictions:
        first_T = plan.first_R.repeat(plan.num_entries_R)  # of the row
        entry_T = np.arange(plan.num_tokens) - first_T
        is_masked_T = (plan.token_T == plan.sampling.mask_token_id) & (entry_T >= self._shift)
        count_T = is_masked_T.cumsum()
        before_T = (count_T - is_masked_T)[first_T]  # masks of the rows before
        is_accepted_T = is_masked_T & (count_T - before_T <= self._num_accepted)
        probability_T = np.full(plan.num_tokens, UNSURE, dtype=np.float32)
        probability_T[is_accepted_T.nonzero()[0] - self._shift] = ACCEPTED
        # Earlier positions are a little surer, so that ties do not all fall to one branch.
        confidence_T = probability_T - entry_T.astype(np.float32) * 1e-4
        return Predictions.of(np.full(plan.num_tokens, self._token), probability_T, confidence_T)


@dataclass(slots=True)
class RecordedRequest:
    """One request of a trained model: its prompt and every step's predictions."""

    prompt: tuple[int, ...]
    steps: list[Predictions] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests, and the settings under which the scheduler makes the same plans again."""

    decode: DecodeConfig
    mask_token_id: int
    eos_token_id: int | None
    requests: list[RecordedRequest]


class RecordingEngine(WrappedEngine):
    """Keeps the predictions of one request after another (one slot)."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.requests: list[RecordedRequest] = []

    def begin(self, prompt: tuple[int, ...]) -> None:
        self.requests.append(RecordedRequest(prompt))

    def answer(self, plan: StepPlan, predictions: Predictions) -> Predictions:
        self.requests[-1].steps.append(predictions)
        return predictions


class ReplayEngine(WrappedEngine):
    """Answers with a recorded request's predictions; the prompt may be longer by filler in front of it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._steps: list[Predictions] = []
        self._filler = 0

    def begin(self, request: RecordedRequest, num_filler: int) -> None:
        self._steps = list(request.steps)
        self._filler = num_filler

    def answer(self, plan: StepPlan, predictions: Predictions) -> Predictions:
        recorded = self._steps.pop(0) if self._steps else None
        filler = self._filler if plan.start_R[0] == 0 else 0
        if recorded is None or plan.num_tokens - filler != recorded.values_3T.shape[1]:
            raise EngineError("the recorded request took other steps than this one: record it again with this version")
        return Predictions(np.pad(recorded.values_3T, ((0, 0), (filler, 0))))


def save_trace(path: Path, trace: Trace) -> None:
    """A compressed npz: the settings as JSON, then every step's three arrays."""
    settings = {
        "decode": trace.decode.model_dump(mode="json"),
        "mask_token_id": trace.mask_token_id,
        "eos_token_id": trace.eos_token_id,
        "prompts": [list(request.prompt) for request in trace.requests],
        "num_steps": [len(request.steps) for request in trace.requests],
    }
    arrays: dict[str, Any] = {"settings": np.frombuffer(json.dumps(settings).encode(), dtype=np.uint8)}
    for number, step in _numbered_steps(trace.requests):
        arrays[f"{number}.token"] = step.token_T.astype(np.int32)
        arrays[f"{number}.probability"] = step.probability_T
        arrays[f"{number}.confidence"] = step.confidence_T
    np.savez_compressed(path, **arrays)


def load_trace(path: Path) -> Trace:
    """Raises ConfigError for a file that is no trace."""
    try:
        with np.load(path) as arrays:
            settings = json.loads(arrays["settings"].tobytes())
            requests = [RecordedRequest(tuple(map(int, prompt))) for prompt in settings["prompts"]]
            for index, request in enumerate(requests):
                names = [f"{index}.{step}" for step in range(settings["num_steps"][index])]
                request.steps = [_step(arrays, name) for name in names]
        decode = DecodeConfig.model_validate(renewed(settings["decode"]))
        return Trace(decode, settings["mask_token_id"], settings["eos_token_id"], requests)
    except (OSError, EOFError, ValueError, LookupError, TypeError, BadZipFile) as error:
        raise ConfigError(
            f"{path}: not a recorded trace ({first_line(error)}); `record_trace` of common.bench.acceptance makes one"
        ) from None


def _step(arrays: Any, name: str) -> Predictions:
    return Predictions.of(arrays[f"{name}.token"], arrays[f"{name}.probability"], arrays[f"{name}.confidence"])


def _numbered_steps(requests: Iterable[RecordedRequest]) -> Iterable[tuple[str, Predictions]]:
    for index, request in enumerate(requests):
        for number, step in enumerate(request.steps):
            yield f"{index}.{number}", step


def record_trace(
    engine: Engine, decode: DecodeConfig, config: ModelConfig, prompts: Iterable[tuple[int, ...]], path: Path
) -> Trace:
    """Decode prompts one after another and write what the model predicted in every step.

    Raises ConfigError for a model without shift: a recording holds predictions of the position after each entry.
    """
    if not config.shift:
        raise ConfigError(f"{path}: recordings are of models with shift, {config.family} has none: record another one")
    recording, mask_token_id = RecordingEngine(engine), config.mask_of(decode.mask_token_id)
    for prompt in prompts:
        recording.begin(prompt)
        scheduler = Scheduler(decode, mask_token_id=mask_token_id, eos_token_id=config.eos_token_id)
        list(decode_requests(iter([GenerationRequest("recorded", prompt)]), scheduler, recording))
    trace = Trace(decode, mask_token_id, config.eos_token_id, recording.requests)
    save_trace(path, trace)
    return trace
