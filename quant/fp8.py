"""The fp8 variant of `w8a8` (e4m3, weights per output channel, activations per token), for GPUs with fp8 matrix units.

Same shapes and scale rules; the products are accumulated in fp32. Folders stay int8: fp8 weights are made from float
weights at load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.w8a8 import QuantizedActivation, QuantizedWeight, channel_scale, dequantize

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_weight(weight_NK: Tensor) -> QuantizedWeight:
    """scale = rowmax|w| / 448; a row of zeros has scale 1."""
    scale_N = channel_scale(weight_NK, FP8_MAX)
    return QuantizedWeight(_round_to_fp8(weight_NK.float() / scale_N[:, None]), scale_N)


def quantize_per_token(x: Tensor) -> QuantizedActivation:
    """scale = rowmax|x| / 448 in fp32; a row of zeros has values and scale 0."""
    x = x.float()
    scale = x.abs().amax(dim=-1) / FP8_MAX
    divisor = torch.where(scale > 0, scale, 1.0)
    return QuantizedActivation(_round_to_fp8(x / divisor[..., None]), scale)


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    weight_scale_N: Tensor,
    x_scale_T: Tensor | None,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """acc * weight_scale * x_scale + bias in fp32, rounded once to `out_dtype`."""
    return dequantize(x_TK.float() @ weight_NK.float().t(), weight_scale_N, x_scale_T, bias_N, out_dtype)


def _round_to_fp8(x: Tensor) -> Tensor:
    # The cast saturates on some builds and gives NaN on others; the clamp makes it one rule.
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
