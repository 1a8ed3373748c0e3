"""Residual add and RMSNorm in one launch, between every two linears of a layer.

Reads the linear before it (bf16, or split-K parts whose sum is taken here), with tensor parallelism sums it over the
ranks, which send one another their addends, and writes the new residual stream and its norm in the form the next linear
reads: bf16, int8 or fp8 with a scale per token. One program computes one token, or several of a narrow model: a device
starts less than one program a nanosecond.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_cuda.kernels.launch import (
    KEEP,
    QUANTIZED_DTYPE,
    QUANTIZED_MAX,
    Partials,
    Quantize,
    Shared,
    load_sum,
    overlap,
    partial_arguments,
    quantize_row,
    release_successor,
    start_after_predecessor,
    sum_of_ranks,
)
from quant.w8a8 import QuantizedActivation

WARPS, QUANTIZED_WARPS = 8, 16
VALUES_A_PROGRAM, VALUES_A_WARP = 1024, 256  # a number that is fixed: else bits depend on the pass


@triton.jit
def _add_rms_norm_kernel(
    values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, inboxes_ptr, residual_ptr, weight_ptr, out_ptr,
    out_scale_ptr, summed_ptr, part_stride, inbox_stride, num_tokens, num_columns, eps,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, IS_BIAS_INT: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    QUANTIZED_MAX: tl.constexpr, IS_INT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    release_successor(PDL)
    column = tl.arange(0, BLOCK)
    mask = column < num_columns
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if TOKENS > 1:
        counted = (token * TOKENS + tl.arange(0, TOKENS))[:, None]
        token, column = tl.minimum(counted, num_tokens - 1), column[None, :] + tl.zeros_like(counted)
        mask, weight = mask[None, :] & (counted < num_tokens), weight[None, :]
    start_after_predecessor(PDL)
    x = load_sum(
        values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, column, mask, part_stride, num_columns,
        PARTS, IS_BIAS_INT,
    )  # fmt: skip
    offset = token.to(tl.int64) * num_columns + column
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)  # here before the ranks' are
    if RANKS > 0:
        x = sum_of_ranks(x, inboxes_ptr, offset, mask, inbox_stride, RANK, RANKS)
    if residual_ptr is not None:
        x += residual
    summed = x.to(tl.bfloat16)
    tl.store(summed_ptr + offset, summed, mask=mask, eviction_policy=KEEP)
    x = summed.to(tl.float32)
    squares = tl.sum(x * x, axis=1, keep_dims=True) if TOKENS > 1 else tl.sum(x * x, axis=0)
    normed = x * tl.rsqrt(squares / num_columns + eps) * weight
    normed = normed.to(tl.bfloat16)
    if QUANTIZED_MAX > 0:
        quantized, scale = quantize_row(normed.to(tl.float32), QUANTIZED_MAX, IS_INT)
        tl.store(out_ptr + offset, quantized, mask=mask, eviction_policy=KEEP)
        tl.store(out_scale_ptr + token, scale)
    else:
        tl.store(out_ptr + offset, normed, mask=mask, eviction_policy=KEEP)


def add_rms_norm(
    x: Tensor | Partials | Shared,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    *,
    quantize: Quantize | None = None,
) -> tuple[Tensor | QuantizedActivation, Tensor]:
    """(RMS norm of x + residual, x + residual in bf16), [T, D] both; the norm optionally quantized per token.

    Shared: a collective of the ranks that hold the addends; all of them launch it for the same tokens.
    """
    inboxes_P, inbox_stride, rank, num_ranks = None, 0, 0, 0
    if isinstance(x, Shared):
        x, inboxes_P, inbox_stride, rank = x
        num_ranks = len(inboxes_P)
    pointers, constants = partial_arguments(x)
    num_tokens, num_columns = pointers[0].shape[-2:]
    device = weight_D.device
    summed_TD = torch.empty((num_tokens, num_columns), dtype=torch.bfloat16, device=device)
    out_TD = torch.empty_like(summed_TD, dtype=QUANTIZED_DTYPE.get(quantize, torch.bfloat16))
    scale_T = None if quantize is None else torch.empty(num_tokens, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(num_columns)
    tokens, warps = 1, WARPS if quantize is None else QUANTIZED_WARPS
    if quantize is None and not num_ranks and block < VALUES_A_PROGRAM:
        tokens, warps = VALUES_A_PROGRAM // block, VALUES_A_PROGRAM // VALUES_A_WARP
    _add_rms_norm_kernel[(triton.cdiv(num_tokens, tokens),)](
        *pointers, inboxes_P, residual_TD, weight_D, out_TD, scale_T, summed_TD, inbox_stride=inbox_stride,
        num_tokens=num_tokens, num_columns=num_columns, eps=eps, TOKENS=tokens, **constants, RANK=rank,
        RANKS=num_ranks, QUANTIZED_MAX=QUANTIZED_MAX.get(quantize, 0.0), IS_INT=quantize == "int8",
        BLOCK=block, num_warps=warps, **overlap(),
    )  # fmt: skip
    return (out_TD if scale_T is None else QuantizedActivation(out_TD, scale_T)), summed_TD
