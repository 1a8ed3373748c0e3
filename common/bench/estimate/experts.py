"""What a mixture of experts moves and multiplies in a step: the launches of lopa_cuda.ops.fused.FusedOps.moe."""

from __future__ import annotations

from collections.abc import Iterator

from common.bench.estimate.operations import Kernel
from common.model import MoE
from common.runtime import share_of_experts_hit

_BYTE, _HALF, _FLOAT = 1, 2, 4  # bytes of 8-bit formats, of bf16 and of float32, which the router computes in


def mixture_kernels(moe: MoE, num_tokens: int, tp_size: int, dtype: str, expert_dtype: str) -> Iterator[Kernel]:
    """Yield the kernels of one rank, if each expert is as likely as any other. Weights of experts that are hit are read
    once; the router and the shared experts are not in 8 bits, and the router is on every rank."""

    def moves(name: str, read: float, written: float) -> Kernel:
        return Kernel("experts", name, "other", read, written, dtype=dtype)

    def multiplies(name: str, read: float, written: float, weight_bytes: float, flops: float, kind: str) -> Kernel:
        read += weight_bytes
        return Kernel("experts", name, "linear", read, written, flops, kind, weight_bytes)

    def grouped(
        name: str, num_experts: float, num_rows: float, num_in: int, num_out: int, num_weights: int, kind: str
    ) -> Kernel:
        """Return a product of so many rows, each with one expert's weights, which are of this dtype as the rows are."""
        size = _HALF if kind == dtype else _BYTE
        moved = size * num_rows * num_in, _HALF * num_rows * num_out
        return multiplies(name, *moved, size * num_experts * num_weights, 2.0 * num_rows * num_weights, kind)

    config, (num_local, width, inner) = moe.config, moe.experts_down.shape
    num_pairs = num_tokens * config.experts_per_token * num_local / config.num_experts
    num_hit = num_local * share_of_experts_hit(config, num_tokens)
    x, logits, pairs = num_tokens * width, num_tokens * config.num_experts, num_tokens * config.experts_per_token
    num_router = moe.router.numel()
    yield multiplies("router", _HALF * x, _FLOAT * logits, _FLOAT * num_router, 2.0 * num_tokens * num_router, dtype)
    yield moves("route", _FLOAT * logits, 2 * _FLOAT * pairs)
    yield moves("deal", _FLOAT * pairs, _FLOAT * pairs)
    if expert_dtype != dtype:
        yield moves("quantize", _HALF * x, x)
        yield moves("quantize", _HALF * num_pairs * inner, num_pairs * inner)
    yield grouped("gate_up", num_hit, num_pairs, width, inner, 2 * inner * width, expert_dtype)
    yield grouped("down", num_hit, num_pairs, inner, width, inner * width, expert_dtype)
    yield moves("sum", _HALF * num_pairs * width, _HALF * x)
    if config.num_shared_experts:
        shared = inner * config.num_shared_experts // tp_size
        yield grouped("shared_gate_up", 1, num_tokens, width, 2 * shared, 2 * shared * width, dtype)
        yield moves("shared_swiglu", 2 * _HALF * num_tokens * shared, _HALF * num_tokens * shared)
        yield grouped("shared_down", 1, num_tokens, shared, width, shared * width, dtype)
