"""What a mixture of experts moves and multiplies in a step: the launches of lopa_cuda.ops.fused.FusedOps.moe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from common.model import MoE
from common.runtime import share_of_experts_hit

_HALF, _FLOAT = 2, 4  # bytes of bf16 and of float32, which the router computes in


class Products(NamedTuple):
    weight_bytes: float
    flops: float


class MixtureKernel(NamedTuple):
    """Bytes of activations read and written; `products` are zeros of a kernel that only moves."""

    name: str
    read: float
    written: float
    products: Products


def mixture_kernels(moe: MoE, num_tokens: int, tp_size: int) -> Iterator[MixtureKernel]:
    """Yield the kernels of one rank, if each expert is as likely as any other. Weights of experts that are hit are read
    once; the router is on every rank."""
    config, (num_local, width, inner) = moe.config, moe.experts_down.shape
    num_pairs = num_tokens * config.experts_per_token * num_local / config.num_experts
    num_hit = num_local * share_of_experts_hit(config, num_tokens)
    x, logits, pairs = num_tokens * width, num_tokens * config.num_experts, num_tokens * config.experts_per_token
    yield _moves("cast", _HALF * x, _FLOAT * x)
    router = Products(_FLOAT * moe.router.numel(), 2.0 * num_tokens * moe.router.numel())
    yield MixtureKernel("router", _FLOAT * x, _FLOAT * logits, router)
    yield _moves("route", _FLOAT * logits, 2 * _FLOAT * pairs)
    yield _moves("deal", _FLOAT * pairs, _FLOAT * pairs)
    yield _grouped("gate_up", num_hit, num_pairs, width, inner, 2 * inner * width)
    yield _grouped("down", num_hit, num_pairs, inner, width, inner * width)
    yield _moves("sum", _HALF * num_pairs * width, _HALF * x)
    if config.num_shared_experts:
        shared = inner * config.num_shared_experts // tp_size
        yield _grouped("shared_gate_up", 1, num_tokens, width, 2 * shared, 2 * shared * width)
        yield _moves("shared_swiglu", 2 * _HALF * num_tokens * shared, _HALF * num_tokens * shared)
        yield _grouped("shared_down", 1, num_tokens, shared, width, shared * width)


def _moves(name: str, read: float, written: float) -> MixtureKernel:
    return MixtureKernel(name, read, written, Products(0.0, 0.0))


def _grouped(
    name: str, num_experts: float, num_rows: float, num_in: int, num_out: int, num_weights: int
) -> MixtureKernel:
    """A product of so many rows, each with one expert's weights."""
    products = Products(_HALF * num_experts * num_weights, 2.0 * num_rows * num_weights)
    return MixtureKernel(name, _HALF * num_rows * num_in, _HALF * num_rows * num_out, products)
