"""Dream-7B's shapes, random tensors of them, and the stopwatch: what every section shares."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.paging import pages_for
from lopa_cuda import kernels
from lopa_cuda.kernels.launch import Quantize
from lopa_cuda.steps import PAGE_SIZE, RECORD, Tiling, write_tiles
from quant.w8a8 import QuantizedActivation

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 3584, 18944, 28, 28, 4, 128, 152064
MASK_ID, EPS = 151666, 1e-6
QKV = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
KINDS = ("bf16", "int8", "fp8")


def linear_shapes(tp: int) -> dict[str, tuple[int, int]]:
    """(output channels, input channels) of every linear on one of tp ranks."""
    return {
        "qkv": (QKV // tp, WIDTH), "o": (WIDTH, WIDTH // tp), "gate_up": (2 * INNER // tp, WIDTH),
        "down": (WIDTH, INNER // tp), "head": (VOCAB // tp, WIDTH),
    }  # fmt: skip


SHAPES = linear_shapes(1)
LAYER = ("qkv", "o", "gate_up", "down")


def graph_us(run: Callable[[int], object], launches: int, replays: int = 15) -> float:
    """Microseconds of one run(i), captured `launches` times in one graph; median over replays."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[3:])


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


@dataclass
class Weight:
    values: Tensor
    scale: Tensor | None = None


def make_weight(num_out: int, num_in: int, kind: str) -> Weight:
    """Random, of the scale trained weights have."""
    if kind == "bf16":
        return Weight(random(num_out, num_in, scale=0.02))
    values = torch.randint(-127, 128, (num_out, num_in), device="cuda", dtype=torch.int8)
    if kind == "fp8":
        values = random(num_out, num_in, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Weight(values, torch.full((num_out,), 2e-4, device="cuda"))


def make_input(num_tokens: int, num_in: int, kind: str) -> Tensor | QuantizedActivation:
    x = random(num_tokens, num_in)
    return x if kind == "bf16" else kernels.quantize_per_token(x, kind)  # type: ignore[arg-type]


def as_quantize(kind: str) -> Quantize | None:
    return None if kind == "bf16" else kind  # type: ignore[return-value]


def num_pages(prefix: int) -> int:
    return pages_for(prefix + 1024, PAGE_SIZE)


def make_committed(prefix: int, *num_layers: int) -> Tensor:
    return random(*num_layers, 2, num_pages(prefix), PAGE_SIZE, KV_HEADS, HEAD_SIZE)


def make_rows(num_rows: int, width: int, prefix: int) -> dict[str, Tensor]:
    """What attention takes beside queries and keys: pages in no order; the tiles of a captured pass, some empty."""
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
