"""Before the first request: capture the shapes that decoding usually has, so that no step waits for a capture.

Other shapes are captured when they first occur. Every rank captures the same ones in the same order, since passes hold
collectives.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator

import torch

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.decoding import Sampling, assign_rows
from common.runtime import synthetic_plan
from lopa_cuda.passes import Passes
from lopa_cuda.steps import Committer, ReadsKey, RowsKey

logger = logging.getLogger(__name__)

NUM_BLOCKS = 4  # windows of up to so many blocks are captured ahead
COMMITTED_BLOCKS = (1, 2, 4, 8)  # by one step
PROMPT_LENGTH = 528  # beyond what is captured: compiles the kernels of a prompt's first pass


@torch.inference_mode()
def warm_up(
    passes: Passes, committer: Committer, config: ModelConfig, decode: DecodeConfig, num_requests: int, bp_size: int
) -> None:
    """Capture windows of whole blocks for all branches of one request and of all, their heads and their commits."""
    if passes.device.type == "cuda":
        _forward_a_prompt(passes, config, bp_size, passes.max_cached)  # what does not fit is found out here
    if not passes.captures_ahead:
        return
    started = time.perf_counter()
    _release_memory(passes)
    sampling = Sampling.of(decode, config.mask_token_id)
    shapes = {passes.buckets.shape(*shape) for shape in usual_shapes(decode, num_requests, bp_size)} - {None}
    # The largest first: graphs share one pool of scratch memory, which then never has to grow.
    for rows, width in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
        passes.layers.entry(RowsKey(rows, width, passes.max_cached, is_captured=True))
    for num_reads in reversed(passes.buckets.reads_up_to(max(rows * width for rows, width in shapes))):
        passes.head.entry(ReadsKey(num_reads, sampling, is_captured=True))
    committer.warm_up([blocks * decode.block_size for blocks in COMMITTED_BLOCKS])
    _forward_a_prompt(passes, config, bp_size, PROMPT_LENGTH)
    # A collector pause would fall into some step; what exists now lives as long as the process.
    gc.collect()
    gc.freeze()
    memory = passes.memory()
    logger.info(
        "captured %d shapes in %.1f s: graphs hold %.2f GiB",
        memory["graphs"], time.perf_counter() - started, memory["capture_bytes"] / 2**30,
    )  # fmt: skip


def _release_memory(passes: Passes) -> None:
    """What loading left cached would otherwise be counted, and released, by the first capture."""
    if passes.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def usual_shapes(decode: DecodeConfig, num_requests: int, bp_size: int) -> Iterator[tuple[int, int]]:
    """(rows of a rank, window) of one request with all its branches, of its anchor alone, and of all requests."""
    branches = max(0, decode.num_lookahead) + 1  # `auto` comes again with its number
    rows = {-(-count // bp_size) for count in (1, branches, branches * num_requests)}
    num_blocks = min(NUM_BLOCKS, -(-decode.max_new_tokens // decode.block_size))
    for blocks in range(1, num_blocks + 1):
        shift_entries = 0 if decode.shift_row == "stale" else 1 if decode.window_attention == "full" else blocks
        for num_rows in sorted(rows):
            yield num_rows, blocks * decode.block_size + shift_entries


def _forward_a_prompt(passes: Passes, config: ModelConfig, bp_size: int, length: int) -> None:
    width = min(length, passes.max_cached)
    plan = synthetic_plan(config, num_rows=1, width=width, num_cached=0, read_share=0.1)
    passes.run(plan, assign_rows(plan, bp_size))
