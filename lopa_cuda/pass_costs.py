"""What a pass costs on this device by its number of tokens, for a run's `pace`.

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
from common.runtime import DeviceEngine, synthetic_plan

logger = logging.getLogger(__name__)

MOST_TOKENS = 8192  # the largest pass of a rank that is timed; beyond, a token costs what it cost last
NUM_BLOCKS = 2  # a usual window
NUM_CACHED = 512


@torch.inference_mode()
def measure_passes(engine: DeviceEngine, config: ModelConfig, decode: DecodeConfig) -> PassCosts:
    """Time passes from one row a rank up to all branches of as many requests as there are slots. Every rank gets the
    same."""
    bp_size, max_model_len = engine.mesh.bp_size, engine.capacity.max_model_len
    most_rows = -(-engine.capacity.num_slots * (decode.num_lookahead + 1) // bp_size)
    width = min(NUM_BLOCKS * decode.block_size, max_model_len)
    num_cached = min(NUM_CACHED, max_model_len - width)
    tokens, seconds, num_rows = [], [], 1
    while len(tokens) < 2 or (num_rows <= 1.5 * most_rows and num_rows * width <= MOST_TOKENS):
        tokens.append(num_rows * bp_size * width)
        plan = synthetic_plan(
            config, num_rows=num_rows * bp_size, width=width, num_cached=num_cached, read_share=0.6
        )  # fmt: skip
        seconds.append(share_from_first(engine.clock(lambda plan=plan: engine.run(plan), engine.device)))
        num_rows = max(num_rows + 1, num_rows * 5 // 4)
    # What was slower than a larger pass was disturbed.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    times = ", ".join(f"{count} tokens {took * 1e3:.2f} ms" for count, took in zip(tokens, seconds, strict=True))
    of_one, of_more = share_from_first(host_seconds(decode, engine.capacity.num_slots))
    logger.info("passes: %s; host %.0f us, and %.0f us a further request", times, of_one * 1e6, of_more * 1e6)
    return PassCosts(tokens, seconds, of_one, of_more)
