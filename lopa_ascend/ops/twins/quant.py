"""Twins of the int8 quantizations and of the W8A8 matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_ascend.ops.rules import refuse, require
from quant import w8a8

_INT8_MAX = 127
_LONGEST_LAST_DIM = 65535


def npu_dynamic_quant(
    input: Tensor, *, smooth_scales: Tensor | None = None, hardware_types: bool = True
) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per token: (round(x / scale), scale = max |x| / 127 in float32)."""
    op = "npu_dynamic_quant"
    half = input.dtype in (torch.float16, torch.bfloat16)
    require(half or (not hardware_types and input.dtype == torch.float32), op, "input is float16 or bfloat16", input)
    require(input.dim() >= 2, op, "input has at least two dimensions", input)
    if smooth_scales is None:
        return quantize_rows(input.float())
    require(smooth_scales.dtype == input.dtype, op, "smooth_scales has the input's dtype", (input, smooth_scales))
    require(smooth_scales.shape == input.shape[-1:], op, "smooth_scales has one value per channel", smooth_scales)
    return quantize_rows(input.float() * smooth_scales.float())


def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """Static int8: round(x * scales + zero_points) with div_mode=False, where `scales` is the reciprocal scale."""
    op = "npu_quantize"
    refuse(op, div_mode=div_mode, axis=axis if axis not in (-1, input.dim() - 1) else None)
    require(dtype == torch.qint8, op, "dtype is qint8 with div_mode=False", dtype)
    floats = (torch.float16, torch.bfloat16, torch.float32)
    require(input.dtype in floats, op, "input is float16, bfloat16 or float32", input)
    require(scales.dtype in floats, op, "scales is float16, bfloat16 or float32", scales)
    fits = scales.dim() == 1 and scales.numel() in (1, input.shape[-1])
    require(fits, op, f"scales is 1-D with 1 or {input.shape[-1]} values", scales)
    total = input.float() * scales.float()
    if zero_points is not None:
        same = zero_points.shape == scales.shape and zero_points.dtype == scales.dtype
        require(same, op, "zero_points has the shape and dtype of scales with div_mode=False", (scales, zero_points))
        total.add_(zero_points.float())
    return _to_int8(total)


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    hardware_types: bool = True,
) -> Tensor:
    """x1 [M, K] int8 @ x2 [K, N] int8, scaled per column and per token; int32 output is the raw accumulator.

    An int32 bias joins the accumulator before the scales, a floating bias is added after them.
    """
    op = "npu_quant_matmul"
    _check_factors(op, x1, x2)
    _check_scales(op, x1, x2, scale, pertoken_scale)
    output = torch.int8 if output_dtype is None else output_dtype
    if output == torch.float32 and not hardware_types:
        output = torch.float32
    elif output not in (torch.bfloat16, torch.int32):
        refuse(op, output_dtype=f"{output_dtype} (None means int8)")
    _check_bias(op, x2, bias, output)
    accumulator = int8_matmul(x1, x2)
    if bias is not None and bias.dtype == torch.int32:
        accumulator = accumulator + bias
    if output == torch.int32:
        require(pertoken_scale is None, op, "int32 output takes no pertoken_scale", pertoken_scale)
        return accumulator
    product = accumulator.float().mul_(scale.float())
    if pertoken_scale is not None:
        product.mul_(pertoken_scale[:, None])
    if bias is not None and bias.dtype != torch.int32:
        product.add_(bias.float())
    return product.to(output)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and float32 scale of each row; a row of zeros stays zeros with scale 0."""
    scale = x.abs().amax(-1) / _INT8_MAX
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return _to_int8(x / divisor.unsqueeze(-1)), scale


def int8_matmul(x1: Tensor, x2: Tensor) -> Tensor:
    """x1 [M, K] @ x2 [K, N], exact in int32."""
    return w8a8.int8_matmul(x1, x2.t())


def _to_int8(x: Tensor) -> Tensor:
    """x is overwritten."""
    return x.round_().clamp_(-128, 127).to(torch.int8)


def _check_factors(op: str, x1: Tensor, x2: Tensor) -> None:
    require(x1.dtype == torch.int8 and x2.dtype == torch.int8, op, "x1 and x2 are int8", (x1, x2))
    refuse(op, batched_factors=(x1, x2) if x1.dim() != 2 or x2.dim() != 2 else None)
    require(x1.shape[1] == x2.shape[0], op, "x1 is [M, K] and x2 [K, N]", (x1, x2))
    longest = max(x1.shape[-1], x2.shape[-1])
    require(longest <= _LONGEST_LAST_DIM, op, f"last dimensions are at most {_LONGEST_LAST_DIM}", (x1, x2))
    require(x1.numel() > 0 and x2.numel() > 0, op, "x1 and x2 are not empty", (x1, x2))


def _check_scales(op: str, x1: Tensor, x2: Tensor, scale: Tensor, pertoken_scale: Tensor | None) -> None:
    width = x2.shape[1]
    require(scale.dtype in (torch.float32, torch.bfloat16), op, "scale is float32 or bfloat16", scale)
    require(scale.dim() == 1 and scale.numel() in (1, width), op, f"scale is 1-D with 1 or N={width} values", scale)
    if pertoken_scale is not None:
        fits = pertoken_scale.dtype == torch.float32 and tuple(pertoken_scale.shape) == (x1.shape[0],)
        require(fits, op, f"pertoken_scale is float32 with shape [M={x1.shape[0]}]", pertoken_scale)


def _check_bias(op: str, x2: Tensor, bias: Tensor | None, output: torch.dtype) -> None:
    if bias is None:
        return
    allowed = (torch.int32,) if output == torch.int32 else (torch.int32, torch.bfloat16, torch.float32)
    require(bias.dtype in allowed, op, f"bias for {output} output is one of {allowed}", bias)
    require(tuple(bias.shape) == (x2.shape[1],), op, f"bias has shape [N={x2.shape[1]}]", bias)
