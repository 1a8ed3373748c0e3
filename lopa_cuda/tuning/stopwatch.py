"""Random operands of linears, and the stopwatch: captured graphs, so that launches cost what they cost in a step.

Importing this needs Triton, running it a CUDA device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lopa_cuda import kernels
from lopa_cuda.kernels.launch import Quantize
from lopa_cuda.tiles import Kind
from quant.w8a8 import QuantizedActivation

DEVICE = "cuda"
ROTATION_BYTES = 400 * 2**20  # weights used in turn: many times the L2 cache, so that none is found there
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Weight:
    values: Tensor
    scale: Tensor | None = None


def graph_us(run: Callable[[int], object], launches: int, replays: int = 15) -> float:
    """Microseconds of one run(i), captured `launches` times in one graph; median over replays."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    times = []
    for _ in range(replays + _WARM_UP):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[_WARM_UP:])


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * scale


def make_weight(num_out: int, num_in: int, kind: Kind) -> Weight:
    """Random weights of the scale that trained weights have."""
    if kind == "bf16":
        return Weight(random(num_out, num_in, scale=0.02))
    values = torch.randint(-127, 128, (num_out, num_in), device=DEVICE, dtype=torch.int8)
    if kind == "fp8":
        values = random(num_out, num_in, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Weight(values, torch.full((num_out,), 2e-4, device=DEVICE))


def rotation(num_out: int, num_in: int, kind: Kind) -> list[Weight]:
    """Enough weights of this shape to rotate over."""
    num_bytes = num_out * num_in * (2 if kind == "bf16" else 1)
    return [make_weight(num_out, num_in, kind) for _ in range(max(2, -(-ROTATION_BYTES // num_bytes)))]


def make_input(num_tokens: int, num_in: int, kind: Kind) -> Tensor | QuantizedActivation:
    x = random(num_tokens, num_in)
    quantize = as_quantize(kind)
    return x if quantize is None else kernels.quantize_per_token(x, quantize)


def as_quantize(kind: Kind) -> Quantize | None:
    return None if kind == "bf16" else kind
