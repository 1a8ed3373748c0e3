"""Dream-7B's shapes, and random tensors of them: what every section shares."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.decoding import Sampling
from common.runtime import pages_for
from lopa_cuda import kernels
from lopa_cuda.steps import PAGE_SIZE, RECORD, Tiling, write_tiles
from lopa_cuda.tiles import Kind
from lopa_cuda.tuning.stopwatch import random

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 3584, 18944, 28, 28, 4, 128, 152064
SAMPLING, EPS = Sampling("default", mask_token_id=151666), 1e-6
QKV = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
KINDS: tuple[Kind, ...] = ("bf16", "int8", "fp8")
LAYER = ("qkv", "o", "gate_up", "down")
# (output channels, input channels)
SHAPES = {
    "qkv": (QKV, WIDTH), "o": (WIDTH, WIDTH), "gate_up": (2 * INNER, WIDTH), "down": (WIDTH, INNER),
    "head": (VOCAB, WIDTH),
}  # fmt: skip


def num_pages(prefix: int) -> int:
    return pages_for(prefix + 1024, PAGE_SIZE)


def make_committed(prefix: int, *num_layers: int) -> Tensor:
    return random(*num_layers, 2, num_pages(prefix), PAGE_SIZE, KV_HEADS, HEAD_SIZE)


def make_rows(num_rows: int, width: int, prefix: int) -> dict[str, Tensor]:
    """Make what attention takes beside queries and keys: pages in no order; the tiles of a captured pass, some
    empty."""
    tiling, num_tokens = Tiling(HEADS // KV_HEADS, kernels.BLOCK_QUERIES), num_rows * width
    first_R = np.arange(num_rows) * width
    fields = (width, width, prefix, prefix, 0)
    spans_6R = np.stack((first_R, *(np.full(num_rows, field) for field in fields)))
    tiles_N8 = np.zeros((max(tiling.room(num_tokens), tiling.needed(spans_6R[1], num_tokens)), RECORD), dtype=np.int32)
    write_tiles(tiles_N8, tiling, spans_6R, num_tokens)
    return {
        "table_SP": torch.randperm(num_pages(prefix), device="cuda")[None].int(),
        "tiles_N8": torch.from_numpy(tiles_N8).cuda(),
        "horizon_T": torch.full((num_tokens,), prefix + width, device="cuda", dtype=torch.int32),
    }
