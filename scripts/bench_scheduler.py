"""Host time of a step without a model: predictions are random, the shapes those of a real run.

python scripts/bench_scheduler.py [--num-lookahead 7] [--window 96] [--requests 1]
python scripts/bench_scheduler.py --engine lopa_cuda --ranks 8
python scripts/bench_scheduler.py --engine lopa_ascend --ranks 4

With --engine, what that engine does on rank 0 of so many branch ranks before it queues a pass is measured beside the
scheduler, for lopa_ascend over block-causal windows. Admitting requests is not part of either.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from common.config import DecodeConfig
from common.decoding import GenerationRequest, Predictions, Scheduler, StepPlan, assign_rows, rows_by_rank
from common.processes import Mesh
from common.runtime import PagePool
from graphs.buckets import Buckets, round_up
from lopa_ascend import passes as ascend
from lopa_ascend.kv import PageBook, pages_for
from lopa_ascend.passes.buffers import Sizes
from lopa_ascend.passes.buffers import StepBuffers as AscendBuffers
from lopa_cuda.machine import MACHINE
from lopa_cuda.shapes import Shapes
from lopa_cuda.steps import LayersKey, StagedSlice, StepBuffers, Tiling

PROMPT_LENGTH, MAX_NEW_TOKENS = 100, 512


class Step(NamedTuple):
    """Seconds of the scheduler, and of the engine before the pass is queued; entries a row."""

    scheduler_s: float
    engine_s: float
    width: float


class EngineHost(Protocol):
    """The host's part of an engine on the first of some branch ranks. Both return seconds."""

    def launch(self, plan: StepPlan) -> float: ...

    def commit(self) -> float: ...


class CudaHost:
    """Of CudaEngine; passes are those of Dream-7B's heads."""

    def __init__(self, num_ranks: int, num_requests: int, num_lookahead: int) -> None:
        rows = num_requests * -(-(num_lookahead + 1) // num_ranks)
        most = rows * (PROMPT_LENGTH + MAX_NEW_TOKENS)
        buckets = Buckets(knee=MACHINE.knee_tokens, max_tokens=most, max_reads=most)
        self._mesh, self._tiling = Mesh(bp_size=num_ranks), Tiling(group=7, queries=64)
        self._shapes = Shapes(self._mesh, buckets, self._tiling, num_ranks * most, captures=True)
        self._buffers: dict[LayersKey, StepBuffers] = {}

    def launch(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        shares, key = self._shapes.arranged(plan, assign_rows(plan, self._mesh.bp_size))
        buffers = self._buffers.get(key) or self._allocate(key)
        buffers.fill(plan, shares[0])
        return time.perf_counter() - began

    def _allocate(self, key: LayersKey) -> StepBuffers:
        staged = StagedSlice(key.num_tokens, None)
        return self._buffers.setdefault(key, StepBuffers(key, torch.device("cpu"), self._tiling, staged))

    def commit(self) -> float:
        return 0.0


class AscendHost:
    """Of AscendEngine; passes are padded as captured ones are, to any size."""

    def __init__(self, num_ranks: int, num_requests: int, num_lookahead: int) -> None:
        self._num_ranks = num_ranks
        rows = num_requests * -(-(num_lookahead + 1) // num_ranks)
        pages = pages_for(PROMPT_LENGTH + MAX_NEW_TOKENS)
        self._book = PageBook(PagePool(rows * pages + 64))
        most = rows * (PROMPT_LENGTH + MAX_NEW_TOKENS)
        self._buffers = AscendBuffers(Sizes(most + 64, most // 32 + 64, pages, most), torch.device("cpu"))

    def launch(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        rows_of = rows_by_rank(plan, self._num_ranks)
        reads = ascend.Reads(plan, rows_of)
        flat = ascend.lay_out(plan, rows_of[0], self._book)
        num_rows = round_up(len(flat.query_ends) + 1, 8)
        num_tokens = round_up(flat.num_tokens + num_rows - len(flat.query_ends), 16)
        self._buffers.fill(ascend.pad(flat, num_tokens, num_rows, self._book))
        took = time.perf_counter() - began
        reads.order(reads.most)
        self._book.prepare_commit(plan)
        return took

    def commit(self) -> float:
        began = time.perf_counter()
        self._book.commit()
        return time.perf_counter() - began


def random_predictions(plan: StepPlan, rng: np.random.Generator) -> Predictions:
    """Confidences low enough that windows stay wide."""
    probability_T = rng.random(plan.num_tokens, dtype=np.float32) * 0.95
    confidence_T = np.log(probability_T + 1e-3, dtype=np.float32)
    return Predictions.of(rng.integers(10, 1000, plan.num_tokens), probability_T, confidence_T)


HOSTS: dict[str, Callable[[int, int, int], EngineHost]] = {"lopa_cuda": CudaHost, "lopa_ascend": AscendHost}


def measure(
    num_lookahead: int, window: int, num_requests: int, num_steps: int, engine: str | None = None, num_ranks: int = 1
) -> list[Step]:
    """Steps of one request whose mean window is within an eighth of the wanted one, while nearly all branches are
    there; of several, which are at different points, all."""
    thresholds = (0.94, 0.1) if num_requests == 1 else (0.85, 0.5)  # a mean window of 96 either way
    attention = {"window_attention": "block_causal", "shift_row": "fresh"} if engine == "lopa_ascend" else {}
    decode = DecodeConfig.model_validate(
        {
            "num_lookahead": num_lookahead, "block_size": 32, "max_new_tokens": MAX_NEW_TOKENS,
            "skip_threshold": thresholds[0], "block_add_threshold": thresholds[1], **attention,
        }
    )  # fmt: skip
    host = HOSTS[engine](num_ranks, num_requests, num_lookahead) if engine else None
    rng = np.random.default_rng(0)
    steps: list[Step] = []
    made = 0
    scheduler = Scheduler(decode, mask_token_id=5, eos_token_id=6, num_slots=num_requests)
    while len(steps) < num_steps:
        while scheduler.has_free_slot:
            scheduler.admit(GenerationRequest(str(made), tuple(range(10, 10 + PROMPT_LENGTH))))
            made += 1
        began = time.perf_counter()
        plan = scheduler.plan_step()
        planned_s = time.perf_counter() - began
        engine_s = host.launch(plan) if host else 0.0
        predictions = random_predictions(plan, rng)
        answered = time.perf_counter()
        winners = scheduler.select_winners(predictions)
        selected_s = time.perf_counter() - answered
        engine_s += host.commit() if host else 0.0
        selected = time.perf_counter()
        scheduler.advance(winners)
        took_s = planned_s + selected_s + time.perf_counter() - selected
        width = plan.num_tokens / plan.num_rows
        is_wanted = abs(width - window) <= window // 8 and plan.num_rows >= 0.9 * (num_lookahead + 1)
        if is_wanted or num_requests > 1:
            steps.append(Step(took_s, engine_s, width))
    return steps


def microseconds(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"median {statistics.median(ordered) * 1e6:.0f} us, 90% below {ordered[len(ordered) * 9 // 10] * 1e6:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-lookahead", type=int, default=7)
    parser.add_argument("--window", type=int, default=96)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--engine", choices=sorted(HOSTS), help="without it the scheduler alone")
    parser.add_argument("--ranks", type=int, default=1, help="branch ranks of the engine")
    options = parser.parse_args()
    steps = measure(
        options.num_lookahead, options.window, options.requests, options.steps, options.engine, options.ranks
    )
    width = statistics.mean(step.width for step in steps)
    print(f"k={options.num_lookahead}, {options.requests} request(s), mean window {width:.0f}, {len(steps)} steps")
    print(f"scheduler: {microseconds([step.scheduler_s for step in steps])} a step")
    if options.engine:
        print(f"{options.engine} before the launch: {microseconds([step.engine_s for step in steps])} a step")


if __name__ == "__main__":
    main()
