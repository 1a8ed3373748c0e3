"""The self-test's checks of what only some families call: norms of heads, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from common.checkpoint import MoEConfig
from lopa_ascend.load import HEAD_SIZE
from lopa_ascend.ops import Dispatched, HeadNorms, Ops
from lopa_ascend.selftest.checks import EPSILON, NUM_TOKENS, Bench
from lopa_ascend.selftest.grades import Verdict, compare

Check = Callable[[Bench], Verdict]


def family_checks(bench: Bench, *, in_8_bits: bool = False) -> Iterator[tuple[str, Check]]:
    """Checks of what the model calls beside `CHECKS`. in_8_bits: whether its experts are quantized."""
    if bench.sizes.has_head_norms:
        yield "norms of heads", _head_norms
    if bench.sizes.moe is not None:
        checks = {"route": _route, "combine": _combine}
        checks |= IN_8_BITS if in_8_bits else {"dispatch": _dispatch, "grouped_matmul": _grouped_matmul}
        for name, check in checks.items():
            yield name, partial(check, moe=bench.sizes.moe)


def _head_norms(bench: Bench) -> Verdict:
    """Norms of heads followed by the rotation, as a layer calls them."""
    sizes = bench.sizes
    qkv = bench.normal(NUM_TOKENS, (sizes.num_heads + 2 * sizes.num_kv_heads) * HEAD_SIZE)
    cos, sin = torch.ones(NUM_TOKENS, 1, HEAD_SIZE).bfloat16(), torch.zeros(NUM_TOKENS, 1, HEAD_SIZE).bfloat16()

    def split(ops: Ops, qkv: Tensor, query_H: Tensor, key_H: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        return ops.split_and_rotate(qkv, *angles, sizes.num_heads, HeadNorms(query_H, key_H, EPSILON))

    return compare(*bench.both(split, qkv, bench.normal(HEAD_SIZE), bench.normal(HEAD_SIZE), cos, sin))


def _route(bench: Bench, moe: MoEConfig) -> Verdict:
    """The experts, which may not differ, and the weights. Scores lie far enough apart for any sigmoid."""
    logits = torch.stack([bench.permuted(moe.num_experts) for _ in range(NUM_TOKENS)]) / moe.num_experts * 8 - 4
    bias = [bench.permuted(moe.num_experts) * 1e-3] if moe.has_expert_bias else []

    def route(ops: Ops, logits: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
        routing = ops.route(logits, bias[0] if bias else None, moe)
        return routing.expert_TC, routing.weight_TC

    return compare(*bench.both(route, logits, *bias))


def _dispatch(bench: Bench, moe: MoEConfig) -> Verdict:
    x, expert_TC = bench.normal(NUM_TOKENS, bench.sizes.width), _chosen(bench, moe)
    num_experts = bench.sizes.num_experts
    return compare(*bench.both(lambda ops, *given: tuple(ops.dispatch(*given, num_experts))[:3], x, expert_TC))


def _grouped_matmul(bench: Bench, moe: MoEConfig) -> Verdict:
    """The product of gate and up; some experts have no row."""
    rows = _dispatched(bench, moe)
    weight = bench.normal(bench.sizes.num_experts, bench.sizes.width, 2 * moe.intermediate_size)
    weight *= bench.sizes.width**-0.5
    return compare(*bench.both(lambda ops, *given: ops.grouped_matmul(*given), rows.rows_ND, weight, rows.count_E))


def _combine(bench: Bench, moe: MoEConfig) -> Verdict:
    rows = _dispatched(bench, moe)
    weight_TC = bench.uniform(NUM_TOKENS, moe.experts_per_token)
    return compare(*bench.both(lambda ops, *given: ops.combine(*given), rows.rows_ND, rows.place_N, weight_TC))


def _dispatch_int8(bench: Bench, moe: MoEConfig) -> Verdict:
    given = bench.int8(NUM_TOKENS, bench.sizes.width), _chosen(bench, moe), bench.uniform(NUM_TOKENS)

    def dispatch(ops: Ops, x: Tensor, expert_TC: Tensor, scale_T: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.dispatch(x, expert_TC, bench.sizes.num_experts, scale_T))

    return compare(*bench.both(dispatch, *given))


def _grouped_int32(bench: Bench, moe: MoEConfig) -> Verdict:
    count_E, width = _dispatched(bench, moe).count_E, bench.sizes.width
    rows = bench.int8(NUM_TOKENS * moe.experts_per_token, width)
    weight = bench.int8(bench.sizes.num_experts, width, 2 * moe.intermediate_size)
    return compare(*bench.both(lambda ops, *given: ops.grouped_matmul_int32(*given), rows, weight, count_E))


def _dequant_swiglu_quant(bench: Bench, moe: MoEConfig) -> Verdict:
    count_E, inner = _dispatched(bench, moe).count_E, moe.intermediate_size
    num_rows = NUM_TOKENS * moe.experts_per_token
    gate_up = torch.round(bench.normal(num_rows, 2 * inner).float() * 4e4).int()
    scales = bench.uniform(bench.sizes.num_experts, 2 * inner), bench.uniform(num_rows)

    def gated(ops: Ops, gate_up: Tensor, weight_scale: Tensor, scale_N: Tensor, count_E: Tensor) -> tuple[Tensor, ...]:
        return ops.dequant_swiglu_quant(gate_up, weight_scale, scale_N, count_E=count_E)

    return compare(*bench.both(gated, gate_up, *scales, count_E))


def _grouped_quant(bench: Bench, moe: MoEConfig) -> Verdict:
    count_E, width, num_experts = _dispatched(bench, moe).count_E, bench.sizes.width, bench.sizes.num_experts
    rows = bench.int8(NUM_TOKENS * moe.experts_per_token, moe.intermediate_size)
    weight, scale_N = bench.int8(num_experts, moe.intermediate_size, width), bench.uniform(len(rows))
    given = rows, weight, count_E, bench.uniform(num_experts, width).bfloat16(), scale_N
    return compare(*bench.both(lambda ops, *given: ops.grouped_quant_matmul(*given, torch.bfloat16), *given))


IN_8_BITS = {
    "dispatch of int8": _dispatch_int8,
    "grouped_matmul_int32": _grouped_int32,
    "dequant_swiglu_quant of experts": _dequant_swiglu_quant,
    "grouped_quant_matmul": _grouped_quant,
}


def _chosen(bench: Bench, moe: MoEConfig) -> Tensor:
    """int32 [T, C] of this rank's experts; the last one has no row where there are enough others."""
    most = max(1, bench.sizes.num_experts - 1)
    rows = [bench.permuted(max(most, moe.experts_per_token))[: moe.experts_per_token] for _ in range(NUM_TOKENS)]
    return (torch.stack(rows) % most).int()


def _dispatched(bench: Bench, moe: MoEConfig) -> Dispatched:
    return bench.twins.dispatch(
        bench.normal(NUM_TOKENS, bench.sizes.width), _chosen(bench, moe), bench.sizes.num_experts
    )
