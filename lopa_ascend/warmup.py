"""Captures the shapes that decoding usually has before the first request, so that few steps wait for a capture.

Other shapes are captured when they first occur.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.checkpoint import ModelConfig
from common.config import BlockDiffusion, DecodeConfig, FastDllmV2
from common.decoding import Sampling
from lopa_ascend.engine import AscendEngine
from lopa_ascend.kv import most_rows
from lopa_ascend.shapes import Shapes

NUM_BLOCKS = 4  # windows of up to so many blocks are captured ahead


@torch.no_grad()
def warm_up(engine: AscendEngine, shapes: Shapes, config: ModelConfig, decode: DecodeConfig) -> None:
    """Capture windows of whole blocks, of the anchor alone and of all branches of one request, and the heads that go
    with them, as far as there is room."""
    usual = set(usual_shapes(shapes, decode, engine.mesh.bp_size))
    most = max((num_tokens for num_tokens, _ in usual), default=0)
    sampling = Sampling.of(decode, config.mask_of(decode.mask_token_id))
    with engine.capturing_ahead():
        for num_tokens, num_rows in sorted(usual, reverse=True):
            if engine.layers.has_room(key := engine.captured_key(num_tokens, num_rows)):
                engine.layers.entry(key)
        for num_reads in reversed([size for size in shapes.heads if size <= most]):
            if (head := engine.reads_key(num_reads, sampling)).is_captured:
                engine.head.entry(head)


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
    """Most blocks of a window, not counting the prompt."""
    if not decode.strategy.is_from_zero:
        return decode.max_new_tokens // decode.block_size
    if decode.block_add_threshold == 1:
        is_one = isinstance(decode.strategy, BlockDiffusion) and decode.strategy.commit == "separate"
        return 1 if is_one or isinstance(decode.strategy, FastDllmV2) else 2  # one full, one of masks
    return -(-decode.max_new_tokens // decode.block_size)
