"""Before the first request: capture the shapes that decoding usually has, so that few steps wait for a capture.

Other shapes are captured when they first occur. All ranks capture the same ones in the same order, since graphs hold
collectives.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator

import torch

from common.checkpoint import ModelConfig
from common.config import BlockDiffusion, DecodeConfig
from common.decoding import Sampling
from lopa_ascend.kv import most_rows
from lopa_ascend.passes.forward import Forward
from lopa_ascend.passes.shapes import Shapes

logger = logging.getLogger(__name__)

NUM_BLOCKS = 4  # windows of up to so many blocks are captured ahead


@torch.no_grad()
def warm_up(passes: Forward, shapes: Shapes, config: ModelConfig, decode: DecodeConfig, num_branch_ranks: int) -> None:
    """Windows of whole blocks, of the anchor alone and of all branches of one request, and the heads that go with
    them."""
    started = time.perf_counter()
    usual = set(usual_shapes(shapes, decode, num_branch_ranks))
    # The largest first: graphs share one pool of scratch memory, which then never has to grow.
    for num_tokens, num_rows in sorted(usual, reverse=True):
        passes.capture_layers(num_tokens, num_rows)
    most = max((num_tokens for num_tokens, _ in usual), default=0)
    for num_reads in reversed([size for size in shapes.heads if size <= most]):
        passes.capture_head(num_reads, Sampling.of(decode, config.mask_of(decode.mask_token_id)))
    # A collector pause would fall into some step; what exists now lives as long as the process.
    gc.collect()
    gc.freeze()
    count = passes.layers.num_captured + passes.head.num_captured
    logger.info("captured %d shapes in %.1f s", count, time.perf_counter() - started)


def usual_shapes(shapes: Shapes, decode: DecodeConfig, num_branch_ranks: int) -> Iterator[tuple[int, int]]:
    is_from_zero = decode.strategy.is_from_zero
    has_shift_entries = decode.shift_row == "fresh" and not is_from_zero
    for rows in {1, most_rows(decode, num_branch_ranks)}:
        for blocks in range(1, min(NUM_BLOCKS, _most_blocks(decode)) + 1):
            shift_entries = blocks if has_shift_entries else 0
            shape = shapes.shape(rows * (blocks * decode.block_size + shift_entries), rows * blocks)
            if shape is not None:
                yield shape


def _most_blocks(decode: DecodeConfig) -> int:
    """Of a window behind the prompt."""
    if not decode.strategy.is_from_zero:
        return decode.max_new_tokens // decode.block_size
    if decode.block_add_threshold == 1:
        is_fused = isinstance(decode.strategy, BlockDiffusion) and decode.strategy.commit == "fused"
        return 2 if is_fused else 1  # one full, one of masks
    return -(-decode.max_new_tokens // decode.block_size)
