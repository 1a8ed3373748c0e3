"""How many lookahead branches are nearly free here: the knee where a step turns from reading weights to arithmetic.

Measured, not computed: passes of one more row on every branch rank are timed until a step costs a tenth more than
with the anchor alone. Every further branch is worth less than the one before (each is one more guess about the same
window), so what is not nearly free is not worth its time.
"""

from __future__ import annotations

import logging

import torch

from common.config import DecodeConfig
from common.launch import share_from_first
from common.models.config import ModelConfig
from common.plan import assign_rows
from common.workload import synthetic_plan
from lopa_cuda.floors import median_seconds
from lopa_cuda.passes import Passes

logger = logging.getLogger(__name__)

NEARLY_FREE = 1.1  # of the time of a step without lookahead
ROWS = (2, 3, 4, 6, 8, 12, 16)  # of one rank
NUM_BLOCKS = 2  # a usual window
NUM_CACHED = 512


@torch.inference_mode()
def count_free_lookaheads(passes: Passes, config: ModelConfig, decode: DecodeConfig, bp_size: int) -> int:
    """num_lookahead that fills the rows which cost almost nothing; the same on every rank."""
    alone_ms = _step_ms(passes, config, decode, 1, bp_size)
    free_rows, times = 1, [f"1 row {alone_ms:.2f} ms"]
    for num_rows in ROWS:
        step_ms = _step_ms(passes, config, decode, num_rows, bp_size)
        times.append(f"{num_rows} rows {step_ms:.2f}")
        if share_from_first(step_ms > NEARLY_FREE * alone_ms):
            break
        free_rows = num_rows
    num_lookahead = free_rows * bp_size - 1
    logger.info("num_lookahead auto is %d: %s (on each of %d ranks)", num_lookahead, ", ".join(times), bp_size)
    return num_lookahead


def _step_ms(passes: Passes, config: ModelConfig, decode: DecodeConfig, num_rows: int, bp_size: int) -> float:
    width = min(NUM_BLOCKS * decode.block_size, passes.max_cached)
    plan = synthetic_plan(
        config, num_rows=num_rows * bp_size, width=width, num_cached=min(NUM_CACHED, passes.max_cached - width),
        read_share=0.6,
    )  # fmt: skip
    row_of = assign_rows(plan, bp_size)
    return median_seconds(lambda: passes.run(plan, row_of), passes.device) * 1e3
