"""Captures every size before the first request, so that no step waits for a capture."""

from __future__ import annotations

import gc

import torch

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.decoding import Sampling
from common.runtime import ReadsKey, synthetic_plan
from lopa_cuda.engine import CudaEngine

WHOLE_BLOCKS = 8  # windows of one request of up to so many blocks are not padded at all
USUAL_BLOCKS = 6  # the most that a request usually decodes at once
COMMITTED_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)  # committed by one step
LEAST_COMMITTED_BLOCKS, MOST_COMMITTED_BYTES = 8, 2**28
_KINDS = (
    {"is_sampled": False, "is_cut": False}, {"is_sampled": True, "is_cut": False}, {"is_sampled": True, "is_cut": True},
)  # fmt: skip


@torch.inference_mode()
def warm_up(engine: CudaEngine, config: ModelConfig, decode: DecodeConfig) -> None:
    """Capture the layers at every size, the head, and commits."""
    shapes, capacity = engine.shapes, engine.capacity
    is_cuda, largest = engine.device.type == "cuda", shapes.buckets.tokens[-1]
    if is_cuda and (not shapes.captures_ahead or capacity.max_model_len > largest):
        # A whole prompt: what does not fit is found out here.
        engine.run(synthetic_plan(config, num_rows=1, width=capacity.max_model_len, num_cached=0, read_share=0.1))
    if not shapes.captures_ahead:
        return
    if is_cuda:  # what loading left cached would otherwise be counted, and released, by the first capture
        gc.collect()
        torch.cuda.empty_cache()
    with engine.capturing_ahead():
        for num_tokens in reversed(shapes.buckets.tokens):
            engine.layers.entry(shapes.captured_key(num_tokens))
        for num_tokens in reversed(shapes.slices):
            engine.layers.entry(shapes.captured_key(num_tokens, is_cut=True))
        usual = Sampling.of(decode, config.mask_of(decode.mask_token_id))
        # Several requests may each be drawn in another way.
        heads = (
            {usual}
            if capacity.num_slots == 1 or usual.num_best
            else {usual, *(usual._replace(**kind) for kind in _KINDS)}
        )
        for num_reads in reversed(shapes.buckets.reads):
            for sampling in sorted(heads, reverse=True):
                engine.head.entry(ReadsKey(num_reads, sampling, is_captured=True))
        most = min(largest, most_committed(decode.block_size, capacity.num_slots, engine.kv.bytes_per_position))
        lengths = (blocks * decode.block_size for blocks in COMMITTED_BLOCKS)
        engine.kv.warm_up([length for length in lengths if length <= most])


def usual_tokens(decode: DecodeConfig, bp_size: int) -> list[int]:
    """Tokens on one rank of whole blocks of one request, with all its branches and with its anchor alone."""
    branches = decode.num_lookahead + 1
    num_blocks = min(WHOLE_BLOCKS, -(-decode.max_new_tokens // decode.block_size))
    is_full = decode.window_attention == "full"
    return [
        rows * (blocks * decode.block_size + (0 if decode.shift_row == "stale" else 1 if is_full else blocks))
        for rows in {1, -(-branches // bp_size)}
        for blocks in range(1, num_blocks + 1)
    ]


def most_committed(block_size: int, num_requests: int, bytes_per_position: int) -> int:
    """Positions of the longest commit that is captured: a block of each request, and at least a few blocks. With
    several requests most steps commit some prompt: then as many as graphs have memory for."""
    usual = max(LEAST_COMMITTED_BLOCKS, num_requests) * block_size
    return usual if num_requests == 1 else max(usual, MOST_COMMITTED_BYTES // bytes_per_position)


def most_reads(decode: DecodeConfig, num_requests: int, bp_size: int) -> int:
    """Entries of a rank in a usual step of all requests, which is the most that goes through the head."""
    rows = -(-(decode.num_lookahead + 1) // bp_size) * num_requests
    return rows * min(USUAL_BLOCKS * decode.block_size, decode.max_new_tokens)
