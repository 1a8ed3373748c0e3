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
    is_quantized = expert_dtype != dtype
    size = _BYTE if is_quantized else _HALF  # of an expert's weights and of what they multiply

    def moves(name: str, read: float, written: float) -> Kernel:
        return Kernel("experts", name, "other", read, written, dtype=dtype)

    def multiplies(
        name: str, read: float, written: float, weight_bytes: float, flops: float, dtype: str = dtype
    ) -> Kernel:
        read += weight_bytes
        return Kernel("experts", name, "linear", read, written, flops, dtype, weight_bytes)

    def grouped(name: str, num_in: int, num_out: int, num_weights: int) -> Kernel:
        """Return a product of all pairs, each with its expert's weights."""
        moved, flops = (size * num_pairs * num_in, _HALF * num_pairs * num_out), 2.0 * num_pairs * num_weights
        return multiplies(name, *moved, size * num_hit * num_weights, flops, expert_dtype)

    config, (num_local, width, inner) = moe.config, moe.experts_down.shape
    num_pairs = num_tokens * config.experts_per_token * num_local / config.num_experts
    num_hit = num_local * share_of_experts_hit(config, num_tokens)
    x, logits, pairs = num_tokens * width, num_tokens * config.num_experts, num_tokens * config.experts_per_token
    num_router = moe.router.numel()
    yield multiplies("router", _HALF * x, _FLOAT * logits, _FLOAT * num_router, 2.0 * num_tokens * num_router)
    yield moves("route", _FLOAT * logits, 2 * _FLOAT * pairs)
    yield moves("deal", _FLOAT * pairs, _FLOAT * pairs)
    if is_quantized:
        yield moves("quantize", _HALF * x, x)
    yield grouped("gate_up", width, inner, 2 * inner * width)
    if is_quantized:
        yield moves("quantize", _HALF * num_pairs * inner, num_pairs * inner)
    yield grouped("down", inner, width, inner * width)
    yield moves("sum", _HALF * num_pairs * width, _HALF * x)
    if config.num_shared_experts:
        shared = inner * config.num_shared_experts // tp_size
        for name, num_in, num_out in (("shared_gate_up", width, 2 * shared), ("shared_down", shared, width)):
            read, written, weights = num_tokens * num_in, num_tokens * num_out, num_in * num_out
            yield multiplies(name, _HALF * read, _HALF * written, _HALF * weights, 2.0 * num_tokens * weights)
            if name == "shared_gate_up":
                yield moves("shared_swiglu", _HALF * written, _HALF * num_tokens * shared)
