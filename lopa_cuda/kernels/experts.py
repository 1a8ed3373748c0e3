"""The products of a mixture of experts: each expert that is hit reads its weights once, for all of its tokens.

`route.deal` has said which (token, choice) pairs are whose, in tiles of one expert's. Two grouped products, gate and up
with SwiGLU, then down, and a sum over each token's choices. A program computes some columns of a tile, and ends at once
where the tile is empty. Sums are taken in a fixed order, without atomics. Experts in 8 bits (quant.experts) multiply
rows that are quantized per token before each product, and scale the sums.

Shapes: P pairs = T tokens times C choices, E experts of this rank, X MLP width of an expert, D model width.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.checkpoint import MoEConfig
from common.model import Activation, MoE, Routing
from lopa_cuda.kernels.launch import KEEP, dequantize, multiply, overlap, release_successor, start_after_predecessor
from lopa_cuda.kernels.quantize import quantize_per_token, silu_times
from lopa_cuda.kernels.route import Deal, deal
from lopa_cuda.tiles import stays_in_unit
from quant.w8a8 import QuantizedActivation

LEAST_BLOCK_TOKENS, MOST_BLOCK_TOKENS = 16, 64
BLOCK_ROWS, BLOCK_BYTES, STAGES = 128, 128, 3  # rows of weights that a program fetches at a time, and bytes of each
SUM_BLOCK = 1024


@triton.jit
def _expert_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, pair_weight_ptr, out_ptr,
    order_ptr, expert_ptr, first_ptr, end_ptr, num_columns,
    DEPTH: tl.constexpr, CHOSEN: tl.constexpr, IS_GATED: tl.constexpr, IS_SWAPPED: tl.constexpr, ACC: tl.constexpr,
    ACCUMULATE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gated: rows of x by token, out in the order of the deal. Else: rows of x in that order, out by pair, weighted."""
    column_tiles = tl.cdiv(num_columns, BLOCK_C)  # those of a tile one after another: they read the same tokens
    column_tile, tile = tl.program_id(0) % column_tiles, tl.program_id(0) // column_tiles
    start_after_predecessor(PDL)
    first, end = tl.load(first_ptr + tile), tl.load(end_ptr + tile)
    if first < end:
        expert = tl.load(expert_ptr + tile)
        place = first + tl.arange(0, BLOCK_T)
        is_row = place < end
        pair = tl.load(order_ptr + place, mask=is_row, other=0)
        column = column_tile * BLOCK_C + tl.arange(0, BLOCK_C)
        is_column = column < num_columns
        depth = tl.arange(0, BLOCK_K)
        source = (pair // CHOSEN if IS_GATED else place).to(tl.int64)
        x_at = x_ptr + source[:, None] * DEPTH + depth[None, :]
        rows_of_expert = num_columns * (2 if IS_GATED else 1)
        w_at = weight_ptr + (expert.to(tl.int64) * rows_of_expert + column)[:, None] * DEPTH + depth[None, :]
        up_offset = num_columns.to(tl.int64) * DEPTH
        acc = tl.zeros([BLOCK_C, BLOCK_T] if IS_SWAPPED else [BLOCK_T, BLOCK_C], ACC)
        acc_up = acc
        for at in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
            x = tl.load(x_at + at, mask=is_row[:, None], other=0.0)
            w = tl.load(w_at + at, mask=is_column[:, None], other=0.0)
            acc = multiply(acc, x, w, IS_SWAPPED, ACCUMULATE)
            if IS_GATED:
                up = tl.load(w_at + up_offset + at, mask=is_column[:, None], other=0.0)
                acc_up = multiply(acc_up, x, up, IS_SWAPPED, ACCUMULATE)
        release_successor(PDL)  # programs that wait would take room from those that stream
        if IS_SWAPPED:
            acc, acc_up = tl.trans(acc), tl.trans(acc_up)
        if x_scale_ptr is not None:
            x_scale = tl.load(x_scale_ptr + source, mask=is_row, other=0.0)[:, None]
            scale_ptr, at_C, is_C = weight_scale_ptr + expert * rows_of_expert, column[None, :], is_column[None, :]
            acc = dequantize(acc, scale_ptr, x_scale, None, at_C, is_C, False)
            if IS_GATED:
                acc_up = dequantize(acc_up, scale_ptr + num_columns, x_scale, None, at_C, is_C, False)
        if IS_GATED:
            y = silu_times(acc.to(tl.bfloat16).to(tl.float32), acc_up.to(tl.bfloat16).to(tl.float32))
            target = place
        else:
            y = (acc * tl.load(pair_weight_ptr + pair, mask=is_row, other=0.0)[:, None]).to(tl.bfloat16)
            target = pair
        out_at = out_ptr + target.to(tl.int64)[:, None] * num_columns + column[None, :]
        tl.store(out_at, y, mask=is_row[:, None] & is_column[None, :], eviction_policy=KEEP)


@triton.jit
def _sum_choices_kernel(
    pairs_ptr, expert_ptr, shared_ptr, out_ptr, num_columns, first_expert, num_experts,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum for one token the shared experts' result and its choices on this rank, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    release_successor(PDL)
    start_after_predecessor(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(CHOSEN):
        pair = token * CHOSEN + number
        own = tl.load(expert_ptr + pair) - first_expert + tl.zeros([BLOCK], tl.int32)
        is_here = (own >= 0) & (own < num_experts)
        total += tl.load(pairs_ptr + pair * num_columns + column, mask=mask & is_here, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        total += tl.load(shared_ptr + token * num_columns + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_columns + column, total.to(tl.bfloat16), mask=mask, eviction_policy=KEEP)


def deal_pairs(routing: Routing, moe: MoE) -> Deal:
    """Deal this rank's experts what the router chose for them."""
    tile = block_tokens(len(routing.expert_TC), moe.config)
    return deal(routing.expert_TC, moe.first_expert, len(moe.experts_down), tile)


def expert_input(x_ND: Tensor, moe: MoE) -> Activation:
    """Return the rows as the experts' weights multiply them: quantized where those are in 8 bits."""
    dtype = moe.experts_down.dtype
    return x_ND if dtype == torch.bfloat16 else quantize_per_token(x_ND, "int8" if dtype == torch.int8 else "fp8")


def mix_experts(x: Activation, routing: Routing, dealt: Deal, moe: MoE, shared_TD: Tensor | None = None) -> Tensor:
    """Return the weighted sum of this rank's experts, and `shared_TD` on top: bf16 [T, D].

    x: as `expert_input` gives it. routing: over all ranks' experts; those of other ranks add nothing. dealt: by
    `deal_pairs`.
    """
    expert_TC, weight_TC = routing
    inner = expert_input(_launch(x, moe.experts_gate_up, moe.experts_gate_up_scale, None, dealt, expert_TC), moe)
    result_PD = _launch(inner, moe.experts_down, moe.experts_down_scale, weight_TC, dealt, expert_TC)
    (num_tokens, chosen), num_columns = expert_TC.shape, result_PD.shape[1]
    out_TD = torch.empty((num_tokens, num_columns), dtype=torch.bfloat16, device=result_PD.device)
    _sum_choices_kernel[(num_tokens, triton.cdiv(num_columns, SUM_BLOCK))](
        result_PD, expert_TC, shared_TD, out_TD, num_columns=num_columns, first_expert=moe.first_expert,
        num_experts=len(moe.experts_down), CHOSEN=chosen, BLOCK=SUM_BLOCK, num_warps=4, **overlap(),
    )  # fmt: skip
    return out_TD


def _launch(
    x: Activation, weight_ECK: Tensor, scale_EC: Tensor | None, weight_TC: Tensor | None, dealt: Deal, expert_TC: Tensor
) -> Tensor:
    """bf16 [P, C], weighted; without weights gated, [P, C / 2]. scale_EC: of weights in 8 bits."""
    x_NK, x_scale_N = x if isinstance(x, QuantizedActivation) else (x, None)
    assert x_NK.is_contiguous() and weight_ECK.is_contiguous() and x_NK.dtype == weight_ECK.dtype
    is_int, is_fp8 = weight_ECK.dtype == torch.int8, weight_ECK.dtype == torch.float8_e4m3fn
    _, num_rows, depth = weight_ECK.shape
    is_gated = weight_TC is None
    parts = 2 if is_gated else 1
    num_columns, block_c, block_k = num_rows // parts, BLOCK_ROWS // parts, _block_depth(weight_ECK)
    out_PC = torch.empty((expert_TC.numel(), num_columns), dtype=torch.bfloat16, device=x_NK.device)
    _expert_kernel[(triton.cdiv(num_columns, block_c) * len(dealt.expert_L),)](
        x_NK, x_scale_N, weight_ECK, scale_EC, weight_TC, out_PC, *dealt[:4], num_columns=num_columns,
        DEPTH=depth, CHOSEN=expert_TC.shape[1], IS_GATED=is_gated, IS_SWAPPED=dealt.tile < 64,
        ACC=tl.int32 if is_int else tl.float32, ACCUMULATE=block_k if is_fp8 and not stays_in_unit(depth) else None,
        BLOCK_T=dealt.tile, BLOCK_C=block_c, BLOCK_K=block_k, STAGES=STAGES, num_warps=4, **overlap(),
    )  # fmt: skip
    return out_PC


def block_tokens(num_tokens: int, config: MoEConfig) -> int:
    """Tokens of a tile: about twice what an expert gets where all are hit alike, as many get more."""
    usual = num_tokens * config.experts_per_token / config.num_experts
    return max(LEAST_BLOCK_TOKENS, min(MOST_BLOCK_TOKENS, triton.next_power_of_2(math.ceil(2 * usual))))


def _block_depth(weight_ECK: Tensor) -> int:
    depth, size = weight_ECK.shape[2], BLOCK_BYTES // weight_ECK.element_size()
    for block in (size, size // 2, size // 4):
        if depth % block == 0:
            return block
    raise ValueError(f"experts of width {depth}: the kernels take multiples of {size // 4}; set kernels to torch")
