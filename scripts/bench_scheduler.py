"""Host time of the scheduler per step, without a model: predictions are random, the shapes those of a real run.

python scripts/bench_scheduler.py [--num-lookahead 7] [--window 96] [--requests 1]

Admitting requests is not part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from common.config import DecodeConfig
from common.decoding import GenerationRequest, Predictions, Scheduler, StepPlan


def random_predictions(plan: StepPlan, rng: np.random.Generator) -> Predictions:
    """Confidences low enough that windows stay wide."""
    probability_T = rng.random(plan.num_tokens, dtype=np.float32) * 0.95
    confidence_T = np.log(probability_T + 1e-3, dtype=np.float32)
    return Predictions.of(rng.integers(10, 1000, plan.num_tokens), probability_T, confidence_T)


def measure(num_lookahead: int, window: int, num_requests: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Microseconds and widths of steps: of one request those whose mean window is within an eighth of the wanted one,
    while nearly all branches are there; of several, which are at different points, all."""
    thresholds = (0.94, 0.1) if num_requests == 1 else (0.85, 0.5)  # a mean window of 96 either way
    decode = DecodeConfig(
        num_lookahead=num_lookahead, block_size=32, max_new_tokens=512, skip_threshold=thresholds[0],
        block_add_threshold=thresholds[1],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    times, widths = [], []
    made = 0
    scheduler = Scheduler(decode, mask_token_id=5, eos_token_id=6, num_slots=num_requests)
    while len(times) < num_steps:
        while scheduler.has_free_slot:
            scheduler.admit(GenerationRequest(str(made), tuple(range(10, 110))))
            made += 1
        began = time.perf_counter()
        plan = scheduler.plan_step()
        planned = time.perf_counter()
        predictions = random_predictions(plan, rng)
        answered = time.perf_counter()
        scheduler.advance(scheduler.select_winners(predictions))
        took = time.perf_counter() - answered + planned - began
        width = plan.num_tokens / plan.num_rows
        is_wanted = abs(width - window) <= window // 8 and plan.num_rows >= 0.9 * (num_lookahead + 1)
        if is_wanted or num_requests > 1:
            times.append(took * 1e6)
            widths.append(width)
    return times, widths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-lookahead", type=int, default=7)
    parser.add_argument("--window", type=int, default=96)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    times, widths = measure(options.num_lookahead, options.window, options.requests, options.steps)
    print(
        f"k={options.num_lookahead}, {options.requests} request(s), mean window {statistics.mean(widths):.0f}: "
        f"median {statistics.median(times):.0f} us a step, 90% below {sorted(times)[len(times) * 9 // 10]:.0f} us, "
        f"{len(times)} steps"
    )


if __name__ == "__main__":
    main()
