"""Quantization of activations where the kernel in front does not fuse it: per token, or by calibrated constants.

bf16 in, int8 or fp8 out, as quant.w8a8 and quant.fp8 define it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.errors import ConfigError
from lopa_cuda.kernels.launch import (
    KEEP,
    QUANTIZED_DTYPE,
    QUANTIZED_MAX,
    Quantize,
    divide,
    overlap,
    quantize_by,
    release_successor,
    round_half_even,
    start_after_predecessor,
)
from quant.w8a8 import QuantizedActivation

MAX_ROW = 32768  # elements a program holds in registers
SHORT_ROW, FEW_TOKENS = 8192, 132  # up to either a row is one block; 132 programs are one a multiprocessor
STATIC_BLOCK = 2048


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up of fp32, rounded once, to bf16."""
    return (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)


@triton.jit
def _load_values(x_ptr, token, column, num_columns, IS_GATED: tl.constexpr):
    """fp32 values of one token's columns, zero after the last: as they are, or SwiGLU of gate and up."""
    mask = column < num_columns
    row = token.to(tl.int64) * num_columns
    if IS_GATED:
        gate = tl.load(x_ptr + 2 * row + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + 2 * row + num_columns + column, mask=mask, other=0.0).to(tl.float32)
        y = silu_times(gate, up).to(tl.float32)
    else:
        y = tl.load(x_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, num_columns, QUANTIZED_MAX: tl.constexpr, IS_INT: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program holds one token, so a row is read once."""
    token = tl.program_id(0)
    release_successor(PDL)
    column = tl.arange(0, BLOCK)
    start_after_predecessor(PDL)
    y = _load_values(x_ptr, token, column, num_columns, IS_GATED)
    if TAIL > 0:
        tail_column = BLOCK + tl.arange(0, TAIL)
        tail = _load_values(x_ptr, token, tail_column, num_columns, IS_GATED)
    highest = tl.max(tl.abs(y), axis=0)
    if TAIL > 0:
        highest = tl.maximum(highest, tl.max(tl.abs(tail), axis=0))
    row_ptr = out_ptr + token.to(tl.int64) * num_columns
    scale = tl.math.div_rn(highest, QUANTIZED_MAX)
    quantized = quantize_by(y, scale, QUANTIZED_MAX, IS_INT)
    tl.store(row_ptr + column, quantized, mask=column < num_columns, eviction_policy=KEEP)
    if TAIL > 0:
        quantized_tail = quantize_by(tail, scale, QUANTIZED_MAX, IS_INT)
        tl.store(row_ptr + tail_column, quantized_tail, mask=tail_column < num_columns, eviction_policy=KEEP)
    tl.store(scale_ptr + token, scale)


@triton.jit
def _quantize_static_kernel(
    x_ptr, scale_ptr, offset_ptr, out_ptr, num_elements, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < num_elements
    release_successor(PDL)
    scale, offset = tl.load(scale_ptr).to(tl.float32), tl.load(offset_ptr).to(tl.float32)
    start_after_predecessor(PDL)
    x = tl.load(x_ptr + element, mask=mask, other=0.0).to(tl.float32)
    scaled = round_half_even(divide(x, scale, tl.math.div_rn(1.0, scale)) + offset)
    tl.store(out_ptr + element, tl.minimum(tl.maximum(scaled, -128.0), 127.0).to(tl.int8), mask=mask)


def quantize_per_token(x_TD: Tensor, kind: Quantize) -> QuantizedActivation:
    """quant.w8a8.quantize_per_token ("int8") or quant.fp8.quantize_per_token ("fp8") of contiguous bf16."""
    return quantize_rows(x_TD, x_TD.shape[1], kind)


def quantize_static(x_TD: Tensor, input_scale: Tensor, input_offset: Tensor) -> Tensor:
    """quant.w8a8.quantize_static of contiguous bf16: int8, one scale and offset [1] for all tokens."""
    assert x_TD.dtype == torch.bfloat16 and x_TD.is_contiguous()
    values = torch.empty_like(x_TD, dtype=torch.int8)
    _quantize_static_kernel[(triton.cdiv(x_TD.numel(), STATIC_BLOCK),)](
        x_TD, input_scale, input_offset, values, x_TD.numel(), BLOCK=STATIC_BLOCK, num_warps=4, **overlap()
    )
    return values


def quantize_rows(x: Tensor, num_columns: int, kind: Quantize) -> QuantizedActivation:
    """Rows of num_columns, or of gate and up of num_columns each, whose SwiGLU is then what is quantized."""
    assert x.dtype == torch.bfloat16 and x.is_contiguous()
    if num_columns > MAX_ROW:
        raise ConfigError(f"quantizing a row of {num_columns} > {MAX_ROW}: raise tensor_parallel_size")
    num_tokens = x.shape[0]
    values = torch.empty((num_tokens, num_columns), dtype=QUANTIZED_DTYPE[kind], device=x.device)
    scale_T = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    block, tail = _blocks(num_columns, num_tokens)
    _quantize_rows_kernel[(num_tokens,)](
        x, values, scale_T, num_columns,
        QUANTIZED_MAX=QUANTIZED_MAX[kind], IS_INT=kind == "int8", IS_GATED=x.shape[1] != num_columns,
        BLOCK=block, TAIL=tail, num_warps=max(4, min(16, (block + tail) // 512)), **overlap(),
    )  # fmt: skip
    return QuantizedActivation(values, scale_T)


def _blocks(num_columns: int, num_tokens: int) -> tuple[int, int]:
    """A row's block, and that of its tail where two blocks fit a long row better than one: what a program holds in
    registers decides how many run at once. For one program a multiprocessor one block is faster."""
    whole = triton.next_power_of_2(num_columns)
    tail = triton.next_power_of_2(num_columns - whole // 2)
    is_whole = whole <= SHORT_ROW or num_tokens <= FEW_TOKENS or tail == whole // 2
    return (whole, 0) if is_whole else (whole // 2, tail)
