"""Host time of a step without a model: predictions are random, the shapes those of a real run.

The scheduler's, and what an engine does on rank 0 of so many branch ranks before it queues a pass. Admitting requests
is not part of either.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np

from common.config import DecodeConfig
from common.decoding import GenerationRequest, ModelFacts, Predictions, Scheduler, StepPlan
from common.scoring import isolation, score
from common.tables import counted

PROMPT_LENGTH, MAX_NEW_TOKENS = 100, 512
# One block after another, as these models are published.
_BLOCKS = {"strategy": "block_diffusion", "window_attention": "block_causal", "block_add_threshold": 1}
# How a family's requests are decoded, and whether its models predict a position by the entry before it (`shift`).
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "dream": (1, {}),
    "llada": (0, {}),
    "sdar": (0, _BLOCKS),
    "llada2": (0, {**_BLOCKS, "strategy": {"name": "block_diffusion", "edit_threshold": 0.97}}),
    "fast_dllm_v2": (1, {**_BLOCKS, "strategy": {"name": "fast_dllm_v2", "sub_block_size": 8}}),
}
_PIPELINED = ("dream", "llada")  # of windows of several blocks
_PROBLEM = {"kind": "code", "entry_point": "double", "inputs": [[1], [2]], "expected": [2, 4]}
_ANSWER = "def double(number):\n    return 2 * number\n"


@dataclass(frozen=True, slots=True)
class HostOptions:
    """window: the mean one that is wanted. engine: a package, over block-causal windows for lopa_ascend; None: the
    scheduler alone. num_ranks: branch ranks of the engine. family: of `FAMILIES`."""

    num_lookahead: int = 7
    window: int = 96
    num_requests: int = 1
    num_steps: int = 2000
    engine: str | None = None
    num_ranks: int = 1
    family: str = "dream"

    @property
    def is_filtered(self) -> bool:
        """Whether only steps near the wanted window count."""
        return self.num_requests == 1 and self.family in _PIPELINED


class HostSizes(NamedTuple):
    """What an engine makes room for. longest: positions of a request. rows_of_rank: of the first branch rank."""

    num_ranks: int
    rows_of_rank: int
    longest: int


class EngineHost(Protocol):
    """The host's part of an engine on the first of some branch ranks. Both return seconds."""

    def launch(self, plan: StepPlan) -> float: ...

    def commit(self) -> float: ...


class HostStep(NamedTuple):
    """Seconds of the scheduler, and of the engine before the pass is queued; entries a row."""

    scheduler_s: float
    engine_s: float
    width: float


def measure_host(options: HostOptions) -> str:
    """Return the times, a line each."""
    steps = host_steps(options)
    width = statistics.mean(step.width for step in steps)
    requests = counted(options.num_requests, "request")
    lines = [
        f"{options.family}, k={options.num_lookahead}, {requests}, mean window {width:.0f}, {len(steps)} steps",
        f"scheduler: {spread([step.scheduler_s for step in steps], 'us')} a step",
    ]
    if options.engine:
        lines.append(f"{options.engine} before the launch: {spread([step.engine_s for step in steps], 'us')} a step")
    return "\n".join(lines)


def host_steps(options: HostOptions) -> list[HostStep]:
    """Time steps: of one request that decodes blocks in a pipeline those whose mean window is within an eighth of the
    wanted one, while nearly all branches are there; of others all."""
    host = _engine_host(options)
    rng = np.random.default_rng(0)
    steps: list[HostStep] = []
    made = 0
    facts = ModelFacts(FAMILIES[options.family][0])
    scheduler = Scheduler(
        _decode(options), mask_token_id=5, eos_token_id=6, num_slots=options.num_requests, facts=facts
    )
    while len(steps) < options.num_steps:
        while scheduler.has_free_slot:
            scheduler.admit(GenerationRequest(str(made), tuple(range(10, 10 + PROMPT_LENGTH))))
            made += 1
        began = time.perf_counter()
        plan = scheduler.plan_step()
        planned_s = time.perf_counter() - began
        engine_s = host.launch(plan) if host else 0.0
        predictions = _random_predictions(plan, rng)
        answered = time.perf_counter()
        winners = scheduler.select_winners(predictions)
        selected_s = time.perf_counter() - answered
        engine_s += host.commit() if host else 0.0
        selected = time.perf_counter()
        scheduler.advance(winners)
        took_s = planned_s + selected_s + time.perf_counter() - selected
        width = plan.num_tokens / plan.num_rows
        is_near = abs(width - options.window) <= options.window // 8
        if not options.is_filtered or (is_near and plan.num_rows >= 0.9 * (options.num_lookahead + 1)):
            steps.append(HostStep(took_s, engine_s, width))
    return steps


def _engine_host(options: HostOptions) -> EngineHost | None:
    """Import the engine's host part by its package's name, since engines stand on this package."""
    if options.engine is None:
        return None
    rows = options.num_requests * -(-(options.num_lookahead + 1) // options.num_ranks)
    host: EngineHost = import_module(f"{options.engine}.bench").Host(
        HostSizes(options.num_ranks, rows, PROMPT_LENGTH + MAX_NEW_TOKENS)
    )
    return host


def _decode(options: HostOptions) -> DecodeConfig:
    skip, add = (0.94, 0.1) if options.is_filtered else (0.85, 0.5)  # a mean window of 96 either way
    attention = {"window_attention": "block_causal", "shift_row": "fresh"} if options.engine == "lopa_ascend" else {}
    return DecodeConfig.model_validate(
        {
            "num_lookahead": options.num_lookahead, "block_size": 32, "max_new_tokens": MAX_NEW_TOKENS,
            "skip_threshold": skip, "block_add_threshold": add, **attention, **FAMILIES[options.family][1],
        }
    )  # fmt: skip


def _random_predictions(plan: StepPlan, rng: np.random.Generator) -> Predictions:
    """Make predictions of confidences so low that windows stay wide."""
    probability_T = rng.random(plan.num_tokens, dtype=np.float32) * 0.95
    confidence_T = np.log(probability_T + 1e-3, dtype=np.float32)
    return Predictions.of(rng.integers(10, 1000, plan.num_tokens), probability_T, confidence_T)


def spread(seconds: list[float], unit: str) -> str:
    """Return the median and what nine in ten lie below. unit: us or ms."""
    ordered, scale = sorted(seconds), {"us": 1e6, "ms": 1e3}[unit]
    tail = ordered[len(ordered) * 9 // 10]
    return f"median {statistics.median(ordered) * scale:.0f} {unit}, 90% below {tail * scale:.0f} {unit}"


def measure_marking(num_programs: int) -> str:
    """Return the milliseconds that marking a generated program takes at this machine's level of isolation, and on the
    next line those of a bare interpreter that starts and ends."""
    _mark()  # tries the levels
    kinds = ((isolation(), _mark), ("bare interpreter", _start_bare))
    return "\n".join(f"{name}: {_milliseconds(action, num_programs)}" for name, action in kinds)


def _milliseconds(action: Callable[[], object], count: int) -> str:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return f"{spread(times, 'ms')}, {count}"


def _mark() -> None:
    assert score(_PROBLEM, _ANSWER), "a right program was marked wrong"


def _start_bare() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
