"""Host time of a step without a model: predictions are random, the shapes those of a real run.

python scripts/bench_scheduler.py [--num-lookahead 7] [--window 96] [--requests 1]
python scripts/bench_scheduler.py --ascend-ranks 4

With --ascend-ranks windows are block-causal, and what the Ascend engine does on rank 0 of so many branch ranks before
it queues a pass is measured beside the scheduler. Admitting requests is not part of either.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch

from common.config import DecodeConfig
from common.decoding import GenerationRequest, Predictions, Scheduler, StepPlan, rows_by_rank
from common.paging import PagePool
from graphs.buckets import round_up
from lopa_ascend.kv import PageBook, pages_for
from lopa_ascend.passes import Reads, lay_out, pad
from lopa_ascend.passes.buffers import Sizes, StepBuffers

PROMPT_LENGTH, MAX_NEW_TOKENS = 100, 512


class Step(NamedTuple):
    """Seconds of the scheduler, and of the engine before the pass is queued; entries a row."""

    scheduler_s: float
    engine_s: float
    width: float


class AscendHost:
    """The host's part of `AscendEngine` on the first of `num_ranks` branch ranks. Passes are padded as captured ones
    are, to any size."""

    def __init__(self, num_ranks: int, num_requests: int, num_lookahead: int) -> None:
        self._num_ranks = num_ranks
        rows = num_requests * -(-(num_lookahead + 1) // num_ranks)
        pages = pages_for(PROMPT_LENGTH + MAX_NEW_TOKENS)
        self._book = PageBook(PagePool(rows * pages + 64))
        most = rows * (PROMPT_LENGTH + MAX_NEW_TOKENS)
        self._buffers = StepBuffers(Sizes(most + 64, most // 32 + 64, pages, most), torch.device("cpu"))

    def launch(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        rows_of = rows_by_rank(plan, self._num_ranks)
        reads = Reads(plan, rows_of)
        flat = lay_out(plan, rows_of[0], self._book)
        num_rows = round_up(len(flat.query_ends) + 1, 8)
        num_tokens = round_up(flat.num_tokens + num_rows - len(flat.query_ends), 16)
        self._buffers.fill(pad(flat, num_tokens, num_rows, self._book))
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


def measure(num_lookahead: int, window: int, num_requests: int, num_steps: int, ascend_ranks: int = 0) -> list[Step]:
    """Steps of one request whose mean window is within an eighth of the wanted one, while nearly all branches are
    there; of several, which are at different points, all."""
    thresholds = (0.94, 0.1) if num_requests == 1 else (0.85, 0.5)  # a mean window of 96 either way
    attention = {"window_attention": "block_causal", "shift_row": "fresh"} if ascend_ranks else {}
    decode = DecodeConfig.model_validate(
        {
            "num_lookahead": num_lookahead, "block_size": 32, "max_new_tokens": MAX_NEW_TOKENS,
            "skip_threshold": thresholds[0], "block_add_threshold": thresholds[1], **attention,
        }
    )  # fmt: skip
    host = AscendHost(ascend_ranks, num_requests, num_lookahead) if ascend_ranks else None
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
    parser.add_argument("--ascend-ranks", type=int, default=0, help="branch ranks; without it the scheduler alone")
    options = parser.parse_args()
    steps = measure(options.num_lookahead, options.window, options.requests, options.steps, options.ascend_ranks)
    width = statistics.mean(step.width for step in steps)
    print(f"k={options.num_lookahead}, {options.requests} request(s), mean window {width:.0f}, {len(steps)} steps")
    print(f"scheduler: {microseconds([step.scheduler_s for step in steps])} a step")
    if options.ascend_ranks:
        print(f"Ascend engine before the launch: {microseconds([step.engine_s for step in steps])} a step")


if __name__ == "__main__":
    main()
