"""What rows cost here, and how many lookahead branches pay: the tokens that more branches are worth, over their cost.

The cost is measured, not computed: passes of two blocks with more and more rows on every branch rank, from where
reading the weights bounds a step to where arithmetic does. For `num_lookahead: auto` the worth is assumed (`WORTH`),
since it depends on the model and the text; `branch_budget: auto` learns it.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.decoding import PassCosts, assign_rows
from common.processes import share_from_first
from common.runtime import synthetic_plan
from lopa_cuda.floors import median_seconds
from lopa_cuda.passes import Passes

logger = logging.getLogger(__name__)

# n branches decode about n^0.4 times the tokens of one in a step. Measured: 2.7 times with 8 on the demo model
# (n^0.47); published: 3.3 times with 14 for D2F-Dream on GSM8K (n^0.45). Less is assumed: doubtful rows stay out.
WORTH = 0.4
GIVE_UP = 0.8  # of the best: more rows only cost from here
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)  # of one rank
MOST_TOKENS = 8192  # of a rank's pass that is timed; beyond, a token costs what it cost last
NUM_BLOCKS = 2  # a usual window
NUM_CACHED = 512


@torch.inference_mode()
def count_paying_lookaheads(passes: Passes, config: ModelConfig, decode: DecodeConfig, bp_size: int) -> int:
    """num_lookahead that decodes the most tokens a second under these assumptions; the same on every rank."""
    best_rows, best_worth, times = 1, 0.0, []
    for num_rows in ROWS:
        step_ms = share_from_first(_step_ms(passes, config, decode, num_rows, bp_size))
        times.append(f"{num_rows} rows {step_ms:.2f} ms")
        worth = num_rows**WORTH / step_ms
        if worth > best_worth:
            best_rows, best_worth = num_rows, worth
        elif worth < GIVE_UP * best_worth:
            break
    num_lookahead = best_rows * bp_size - 1
    logger.info("num_lookahead auto is %d: %s (on each of %d ranks)", num_lookahead, ", ".join(times), bp_size)
    return num_lookahead


@torch.inference_mode()
def measure_passes(
    passes: Passes, config: ModelConfig, decode: DecodeConfig, num_requests: int, bp_size: int
) -> PassCosts:
    """From one row a rank to all branches of `num_requests`; the same on every rank."""
    most_rows = -(-num_requests * (decode.num_lookahead + 1) // bp_size)
    width = _width(passes, decode)
    tokens, seconds, num_rows = [], [], 1
    while len(tokens) < 2 or (num_rows <= 1.5 * most_rows and num_rows * width <= MOST_TOKENS):
        tokens.append(num_rows * bp_size * width)
        seconds.append(share_from_first(_step_ms(passes, config, decode, num_rows, bp_size)) / 1e3)
        num_rows = max(num_rows + 1, num_rows * 5 // 4)
    # What was slower than a larger pass was disturbed.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    times = ", ".join(f"{count} tokens {took * 1e3:.2f} ms" for count, took in zip(tokens, seconds, strict=True))
    logger.info("branch_budget auto: %s", times)
    return PassCosts(tokens, seconds)


def _width(passes: Passes, decode: DecodeConfig) -> int:
    return min(NUM_BLOCKS * decode.block_size, passes.max_model_len)


def _step_ms(passes: Passes, config: ModelConfig, decode: DecodeConfig, num_rows: int, bp_size: int) -> float:
    width = _width(passes, decode)
    plan = synthetic_plan(
        config, num_rows=num_rows * bp_size, width=width, num_cached=min(NUM_CACHED, passes.max_model_len - width),
        read_share=0.6,
    )  # fmt: skip
    row_of = assign_rows(plan, bp_size)
    return median_seconds(lambda: passes.run(plan, row_of), passes.device) * 1e3
