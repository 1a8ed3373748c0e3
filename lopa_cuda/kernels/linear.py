"""Skinny linears: few tokens against a large weight, bound by streaming the weight once.

bf16, int8 (exact int32 sums) and fp8 e4m3, operands fetched by the tensor memory accelerator. The depth is cut into
split-K parts so that every multiprocessor streams from the first microsecond to the last; the parts are summed in a
fixed order by whoever reads them (norm, rope, or `sum_partials`), without atomics. Each program prefetches the head of
its weight rows into L2 before it waits for its predecessor. `lopa_cuda.tiles` says for which shapes this beats the
library.

Shapes: T tokens, C output channels, K input channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from lopa_cuda.kernels.launch import (
    KEEP,
    Partials,
    Quantize,
    dequantize,
    load_sum,
    multiply,
    overlap,
    partial_arguments,
    prefetch_rows,
    release_successor,
    start_after_predecessor,
)
from lopa_cuda.kernels.quantize import quantize_per_token, silu_times
from lopa_cuda.kernels.swiglu import swiglu
from lopa_cuda.tiles import MOST_TILE_TOKENS, LinearConfig, WideConfig, find_config, stays_in_unit
from lopa_cuda.wgmma import KIND_OF, launch_wide_linear
from quant.w8a8 import QuantizedActivation

SUM_BLOCK = 1024
UNIT_CHANNELS = 128  # after which float8 sums that do not stay in the matrix unit leave it
_INVARIANT_TILE = LinearConfig(128, 64, 1, 4, warps=8)


@triton.jit
def _prefetch_tile(
    weight_ptr, column0, num_columns, num_rows, first, last, row_bytes, prefetch_bytes,
    IS_GATED: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_C: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Pull the head of this program's weight rows into L2; of gate and of up where there are two."""
    num_bytes = tl.minimum(prefetch_bytes, (last - first) * BLOCK_BYTES)
    for half in tl.static_range(2 if IS_GATED else 1):
        row = column0 + half * num_columns
        prefetch_rows(weight_ptr, row, num_rows, first * BLOCK_BYTES, row_bytes, num_bytes, BLOCK_C, THREADS)


@triton.jit
def _add_block(
    acc, acc_up, x, weight_desc, column, num_columns, at,
    IS_GATED: tl.constexpr, IS_SWAPPED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """One block of input channels, from `at` on, into a tile's sums; into those of up as well where it is gated."""
    acc = multiply(acc, x, weight_desc.load([column, at]), IS_SWAPPED, ACCUMULATE)
    if IS_GATED:
        acc_up = multiply(acc_up, x, weight_desc.load([num_columns + column, at]), IS_SWAPPED, ACCUMULATE)
    return acc, acc_up


@triton.jit
def _sum_tile(
    x_desc, weight_desc, tail_desc, token0, column0, num_columns, first, last,
    ACC: tl.constexpr, IS_GATED: tl.constexpr, IS_SWAPPED: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[tokens, columns] of gate (or of the one weight) and of up, then of the tail's columns (unused if TAIL is 0)."""
    acc = tl.zeros([BLOCK_C, BLOCK_T] if IS_SWAPPED else [BLOCK_T, BLOCK_C], ACC)
    acc_up = acc
    acc_tail = tl.zeros([BLOCK_T, TAIL if TAIL > 0 else 16], ACC)
    acc_up_tail = acc_tail
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * BLOCK_K
        x = x_desc.load([token0, at])
        acc, acc_up = _add_block(
            acc, acc_up, x, weight_desc, column0, num_columns, at, IS_GATED, IS_SWAPPED, ACCUMULATE
        )  # fmt: skip
        if TAIL > 0:
            acc_tail, acc_up_tail = _add_block(
                acc_tail, acc_up_tail, x, tail_desc, column0 + BLOCK_C, num_columns, at, True, False, ACCUMULATE
            )  # fmt: skip
    if IS_SWAPPED:
        acc = tl.trans(acc)
        if IS_GATED:
            acc_up = tl.trans(acc_up)
    return acc, acc_up, acc_tail, acc_up_tail


@triton.jit
def _finish_tile(
    acc, acc_up, out_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, column, num_tokens, num_columns,
    IS_GATED: tl.constexpr, IS_PARTIAL: tl.constexpr, IS_BIAS_INT: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums as they are (a split-K part), or scaled, with bias, gated, in bf16."""
    is_column = column < num_columns
    mask = (token < num_tokens) & is_column
    at = token.to(tl.int64) * num_columns + column
    if IS_PARTIAL:
        tl.store(out_ptr + at, acc, mask=mask, eviction_policy=KEEP)
    else:
        x_scale = None
        if x_scale_ptr is not None:
            x_scale = tl.load(x_scale_ptr + token, mask=token < num_tokens, other=0.0)
        y = dequantize(acc, weight_scale_ptr, x_scale, bias_ptr, column, is_column, IS_BIAS_INT).to(tl.bfloat16)
        if IS_GATED:
            up = dequantize(acc_up, weight_scale_ptr, x_scale, None, column + num_columns, is_column, IS_BIAS_INT)
            y = silu_times(y.to(tl.float32), up.to(tl.bfloat16).to(tl.float32))
            tl.store(out_ptr + at, y, mask=mask, eviction_policy=KEEP)
        else:
            tl.store(out_ptr + at, y, mask=mask)


@triton.jit
def _linear_kernel(
    x_desc, weight_desc, tail_desc, weight_ptr, out_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr,
    num_tokens, num_columns, num_rows, row_bytes, num_blocks, prefetch_bytes, part_stride,
    ACC: tl.constexpr, IS_GATED: tl.constexpr, IS_PARTIAL: tl.constexpr, IS_SWAPPED: tl.constexpr,
    IS_BIAS_INT: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_BYTES: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of x @ w.T over one split-K part. Gated: the same tile of gate and of up (num_columns rows below)."""
    column0, part, token0 = tl.program_id(0) * (BLOCK_C + TAIL), tl.program_id(1), tl.program_id(2) * BLOCK_T
    first, last = part * num_blocks // SPLITS, (part + 1) * num_blocks // SPLITS
    if EARLY:
        release_successor(PDL)
    if PDL:
        _prefetch_tile(
            weight_ptr, column0, num_columns, num_rows, first, last, row_bytes, prefetch_bytes,
            IS_GATED, BLOCK_BYTES, BLOCK_C, THREADS,
        )  # fmt: skip
    start_after_predecessor(PDL)
    acc, acc_up, acc_tail, acc_up_tail = _sum_tile(
        x_desc, weight_desc, tail_desc, token0, column0, num_columns, first, last,
        ACC, IS_GATED, IS_SWAPPED, ACCUMULATE, BLOCK_T, BLOCK_C, TAIL, BLOCK_K, STAGES,
    )  # fmt: skip
    if not EARLY:
        release_successor(PDL)
    token = token0 + tl.arange(0, BLOCK_T)[:, None]
    column = column0 + tl.arange(0, BLOCK_C)[None, :]
    out_ptr += part * part_stride
    _finish_tile(
        acc, acc_up, out_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, column, num_tokens, num_columns,
        IS_GATED, IS_PARTIAL, IS_BIAS_INT,
    )  # fmt: skip
    if TAIL > 0:
        column = column0 + BLOCK_C + tl.arange(0, TAIL)[None, :]
        _finish_tile(
            acc_tail, acc_up_tail, out_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, column, num_tokens,
            num_columns, IS_GATED, IS_PARTIAL, IS_BIAS_INT,
        )  # fmt: skip


@triton.jit
def _sum_kernel(
    values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, out_ptr, part_stride, num_columns,
    PARTS: tl.constexpr, IS_BIAS_INT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    release_successor(PDL)
    start_after_predecessor(PDL)
    y = load_sum(
        values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, column, mask, part_stride, num_columns,
        PARTS, IS_BIAS_INT,
    )  # fmt: skip
    tl.store(out_ptr + token.to(tl.int64) * num_columns + column, y.to(tl.bfloat16), mask=mask)


def sum_partials(partials: Tensor | Partials) -> Tensor:
    """bf16 [T, C]; a Tensor passes through. For a consumer that needs the sum."""
    if isinstance(partials, Tensor):
        return partials
    pointers, constants = partial_arguments(partials)
    _, num_tokens, num_columns = partials.values.shape
    out_TC = torch.empty((num_tokens, num_columns), dtype=torch.bfloat16, device=partials.values.device)
    _sum_kernel[(num_tokens, triton.cdiv(num_columns, SUM_BLOCK))](
        *pointers, out_TC, num_columns=num_columns, **constants, BLOCK=SUM_BLOCK, num_warps=4, **overlap()
    )
    return out_TC


def linear(
    x: Tensor | QuantizedActivation, weight: Tensor, bias: Tensor | None = None, weight_scale: Tensor | None = None
) -> Tensor:
    """x [T, K] @ weight [C, K].T + bias -> bf16 [T, C].

    bf16: a Tensor and a bf16 weight. int8 and fp8 (e4m3): a QuantizedActivation, the weight in that dtype and its
    weight_scale [C]; a static int8 linear passes QuantizedActivation(values, None), deq_scale and an int32 bias.
    """
    return sum_partials(linear_partials(x, weight, bias, weight_scale))


def linear_partials(
    x: Tensor | QuantizedActivation, weight: Tensor, bias: Tensor | None = None, weight_scale: Tensor | None = None
) -> Tensor | Partials:
    """`linear` for a consumer that adds the split-K parts itself (norm, rope). A Tensor where that is faster."""
    values, x_scale = (x, None) if isinstance(x, Tensor) else x
    config = find_config(KIND_OF[weight.dtype], *weight.shape, values.shape[0], "none")
    if config is None:
        return _library_linear(values, x_scale, weight, bias, weight_scale)
    return launch_linear(values, x_scale, weight, bias, weight_scale, config)


def gate_up_swiglu(
    x: Tensor | QuantizedActivation,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    *,
    quantize: Quantize | None = None,
) -> Tensor | QuantizedActivation:
    """silu(x @ gate.T) * (x @ up.T), weight = gate over up [2 I, K] -> [T, I] in bf16 or quantized per token."""
    values, x_scale = (x, None) if isinstance(x, Tensor) else x
    config = find_config(KIND_OF[weight.dtype], *weight.shape, values.shape[0], "swiglu")
    if config is None:
        return swiglu(linear(x, weight, None, weight_scale), quantize=quantize)
    y_TI = launch_linear(values, x_scale, weight, None, weight_scale, config, is_gated=True)
    assert isinstance(y_TI, Tensor)
    return y_TI if quantize is None else quantize_per_token(y_TI, quantize)


def invariant_linear(x_TK: Tensor, weight_CK: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """bf16 [T, C], each row by the same sums whatever T is: one tile for every number of tokens."""
    block_k = 64 if weight_CK.shape[1] % 64 == 0 else 32
    tile = _INVARIANT_TILE._replace(block_k=block_k)
    y_TC = launch_linear(x_TK, None, weight_CK, bias_C, None, tile, block_t=MOST_TILE_TOKENS)
    assert isinstance(y_TC, Tensor)
    return y_TC


def launch_linear(
    x_TK: Tensor, x_scale_T: Tensor | None, weight_CK: Tensor, bias_C: Tensor | None, weight_scale_C: Tensor | None,
    config: LinearConfig | WideConfig, *, is_gated: bool = False, block_t: int | None = None,
) -> Tensor | Partials:  # fmt: skip
    """Run the kernel of this tile: bf16 [T, C] from one part, else Partials; gated bf16 [T, C / 2]. block_t: tokens of
    one of Triton's tiles; None: by the number of tokens."""
    assert weight_CK.is_contiguous() and x_TK.is_contiguous()
    if isinstance(config, WideConfig):
        columns = weight_CK.shape[0] // (2 if is_gated else 1)
        out_TC = torch.empty((x_TK.shape[0], columns), dtype=torch.bfloat16, device=x_TK.device)
        launch_wide_linear(x_TK, x_scale_T, weight_CK, bias_C, weight_scale_C, config, out_TC, is_gated=is_gated)
        return out_TC
    assert not is_gated or config.splits == 1, "silu needs the whole sum"
    num_tokens, depth = x_TK.shape
    num_columns = weight_CK.shape[0] // (2 if is_gated else 1)
    is_int, is_partial = weight_CK.dtype == torch.int8, config.splits > 1
    is_moving = weight_CK.dtype == torch.float8_e4m3fn and not stays_in_unit(depth, config.splits)
    acc_dtype = torch.int32 if is_int else torch.float32
    shape = (config.splits, num_tokens, num_columns) if is_partial else (num_tokens, num_columns)
    out = torch.empty(shape, dtype=acc_dtype if is_partial else torch.bfloat16, device=x_TK.device)
    assert weight_CK.shape[1] % config.block_k == 0
    block_t = block_t or config.tile_tokens(num_tokens)
    num_tiles = triton.cdiv(num_columns, config.block_c + config.tail)
    tail = TensorDescriptor.from_tensor(weight_CK, [config.tail, config.block_k]) if config.tail else None
    _linear_kernel[(num_tiles, config.splits, triton.cdiv(num_tokens, block_t))](
        TensorDescriptor.from_tensor(x_TK, [block_t, config.block_k]),
        TensorDescriptor.from_tensor(weight_CK, [config.block_c, config.block_k]), tail,
        weight_CK, out, weight_scale_C, x_scale_T, bias_C,
        num_tokens=num_tokens, num_columns=num_columns, num_rows=weight_CK.shape[0],
        row_bytes=depth * weight_CK.element_size(), num_blocks=depth // config.block_k,
        prefetch_bytes=config.prefetch, part_stride=num_tokens * num_columns,
        ACC=tl.int32 if is_int else tl.float32, IS_GATED=is_gated, IS_PARTIAL=is_partial,
        IS_SWAPPED=config.swap or block_t < 64,
        IS_BIAS_INT=bias_C is not None and bias_C.dtype == torch.int32,
        ACCUMULATE=min(UNIT_CHANNELS, config.block_k) if is_moving else None,
        BLOCK_T=block_t, BLOCK_C=config.block_c, TAIL=config.tail, BLOCK_K=config.block_k,
        BLOCK_BYTES=config.block_k * weight_CK.element_size(), SPLITS=config.splits, STAGES=config.stages,
        EARLY=config.early, THREADS=32 * config.warps, num_warps=config.warps, **overlap(),
    )  # fmt: skip
    return Partials(out, weight_scale_C, x_scale_T, bias_C) if is_partial else out


def _library_linear(
    x_TK: Tensor, x_scale_T: Tensor | None, weight_CK: Tensor, bias_C: Tensor | None, weight_scale_C: Tensor | None
) -> Tensor | Partials:
    if weight_CK.dtype == torch.bfloat16:
        return functional.linear(x_TK, weight_CK, bias_C)
    assert weight_scale_C is not None, "quantized weights have a scale per channel"
    if weight_CK.dtype == torch.int8:
        # The library's int8 product wants more than 16 rows.
        padded = functional.pad(x_TK, (0, 0, 0, 17 - len(x_TK))) if len(x_TK) <= 16 else x_TK
        acc_1TC = torch._int_mm(padded, weight_CK.t())[: len(x_TK)].unsqueeze(0)
        return Partials(acc_1TC, weight_scale_C, x_scale_T, bias_C)
    assert x_scale_T is not None, "fp8 linears are dynamic"
    return torch._scaled_mm(
        x_TK, weight_CK.t(), scale_a=x_scale_T[:, None], scale_b=weight_scale_C[None, :],
        bias=None if bias_C is None else bias_C.to(torch.bfloat16), out_dtype=torch.bfloat16,
        use_fast_accum=stays_in_unit(x_TK.shape[1]),
    )  # fmt: skip
