"""Turns a float linear into the tensors of a quantized one, at load time and for a folder alike."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quant import fp8, w8a8
from quant.errors import QuantizationError

Scheme = Literal["w8a8_dynamic", "w8a8", "fp8"]


class StaticInput(NamedTuple):
    """How a static linear quantizes its input: round(x / scale + offset)."""

    scale: Tensor  # fp32 [1]
    offset: Tensor  # fp32 [1], a whole number in -128..127


def quantize_linear(
    weight_NK: Tensor, bias_N: Tensor | None, scheme: Scheme, static_input: StaticInput | None = None
) -> dict[str, Tensor]:
    """Return the tensors that `linear.QuantizedLinear` takes. Scales are bfloat16 values (rounded up), kept in fp32.

    `static_input` is needed for the static scheme "w8a8" and unused otherwise.
    """
    bias = None if bias_N is None else bias_N.float()
    if scheme == "fp8":
        return _with_bias(fp8.quantize_weight(weight_NK), bias)
    scale = w8a8.channel_scale(weight_NK)
    if scheme == "w8a8_dynamic":
        return _with_bias(w8a8.quantize_weight(weight_NK, w8a8.round_up_to_bfloat16(scale)), bias)
    if static_input is None:
        raise QuantizationError("scheme 'w8a8' is static: give a calibration, or use 'w8a8_dynamic'")
    if bias is not None:
        scale = torch.maximum(scale, w8a8.least_scale_for_bias(bias, static_input.scale))
    weight = w8a8.quantize_weight(weight_NK, w8a8.round_up_to_bfloat16(scale))
    deq_scale, quant_bias = w8a8.static_parameters(weight, static_input.scale, static_input.offset, bias)
    return {
        "weight": weight.values,
        "weight_scale": weight.scale,
        "input_scale": static_input.scale,
        "input_offset": static_input.offset,
        "deq_scale": deq_scale,
        "quant_bias": quant_bias,
    }


def _with_bias(weight: w8a8.QuantizedWeight, bias: Tensor | None) -> dict[str, Tensor]:
    tensors = {"weight": weight.values, "weight_scale": weight.scale}
    return tensors if bias is None else {**tensors, "bias": bias}
