"""What a pass costs on this device by its number of tokens, for `branch_budget: auto`.

The cost is measured, not computed: passes of two blocks with more and more rows on every branch rank, from where
reading the weights bounds a step to where arithmetic does.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.decoding import PassCosts, host_seconds
from common.processes import share_from_first
from common.runtime import synthetic_plan
from lopa_cuda.passes import CudaPasses

logger = logging.getLogger(__name__)

MOST_TOKENS = 8192  # of a rank's pass that is timed; beyond, a token costs what it cost last
NUM_BLOCKS = 2  # a usual window
NUM_CACHED = 512


@torch.inference_mode()
def measure_passes(
    passes: CudaPasses, config: ModelConfig, decode: DecodeConfig, num_requests: int, bp_size: int
) -> PassCosts:
    """Time passes from one row a rank up to all branches of `num_requests`. Every rank gets the same."""
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
    of_one, of_more = share_from_first(host_seconds(decode, num_requests))
    logger.info(
        "branch_budget auto: %s; host %.0f us, and %.0f us a further request", times, of_one * 1e6, of_more * 1e6
    )
    return PassCosts(tokens, seconds, of_one, of_more)


def _width(passes: CudaPasses, decode: DecodeConfig) -> int:
    return min(NUM_BLOCKS * decode.block_size, passes.max_model_len)


def _step_ms(passes: CudaPasses, config: ModelConfig, decode: DecodeConfig, num_rows: int, bp_size: int) -> float:
    width = _width(passes, decode)
    plan = synthetic_plan(
        config, num_rows=num_rows * bp_size, width=width, num_cached=min(NUM_CACHED, passes.max_model_len - width),
        read_share=0.6,
    )  # fmt: skip
    return passes.clock(lambda: passes.run(plan), passes.device) * 1e3
