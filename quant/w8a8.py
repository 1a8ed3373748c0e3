"""The W8A8 arithmetic in plain PyTorch: the specification that every engine's kernels follow.

Shapes: T tokens, K input channels, N output channels; weights are [N, K] as in checkpoints. Weights are symmetric with
one scale per output channel. Activations are either *dynamic* (symmetric, one scale per token, computed on the fly) or
*static* (one scale and offset per tensor, calibrated). Sources: torch_npu's documentation of npu_dynamic_quant,
npu_quantize and npu_quant_matmul; msmodelslim's exporter for deq_scale and quant_bias.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INT8_MAX = 127


class QuantizedWeight(NamedTuple):
    values: Tensor  # int8 (or float8) [N, K]
    scale: Tensor  # fp32 [N]


class QuantizedActivation(NamedTuple):
    """A tuple, so that it passes through compiled graphs and module calls unchanged."""

    values: Tensor  # int8 (or float8) [..., K]
    scale: Tensor  # fp32 [...]


class StaticParameters(NamedTuple):
    """What a statically quantized linear multiplies and adds: y = (acc + quant_bias) * deq_scale."""

    deq_scale: Tensor  # fp32 [N]
    quant_bias: Tensor  # int32 [N]


def channel_scale(weight_NK: Tensor, most: float = INT8_MAX) -> Tensor:
    """rowmax|w| / most in fp32 [N]; 1 for a row of zeros."""
    scale = weight_NK.float().abs().amax(dim=1) / most
    return torch.where(scale > 0, scale, 1.0)


def quantize_weight(weight_NK: Tensor, scale_N: Tensor | None = None) -> QuantizedWeight:
    """Symmetric per output channel, values in -127..127. Positive scales may be given, e.g. rounded up ones."""
    if scale_N is None:
        scale_N = channel_scale(weight_NK)
    return QuantizedWeight(_round_to_int8(weight_NK.float() / scale_N[:, None], low=-INT8_MAX), scale_N)


def dequantize_weight(weight: QuantizedWeight) -> Tensor:
    return weight.values.float() * weight.scale[:, None]


def quantize_per_token(x: Tensor) -> QuantizedActivation:
    """scale = rowmax|x| / 127 in fp32, values = round half even(x / scale); a row of zeros has values and scale 0."""
    x = x.float()
    scale = x.abs().amax(dim=-1) / INT8_MAX
    divisor = torch.where(scale > 0, scale, 1.0)
    return QuantizedActivation(_round_to_int8(x / divisor[..., None]), scale)


def quantize_static(x: Tensor, input_scale: Tensor, input_offset: Tensor) -> Tensor:
    """int8 round half even(x / input_scale + input_offset), saturating; scale and offset are [1]."""
    return _round_to_int8(x.float() / input_scale.float() + input_offset.float())


def least_scale_for_bias(bias_N: Tensor, input_scale: Tensor) -> Tensor:
    """The weight scale [N] below which bias / deq_scale would crowd the products out of int32."""
    return bias_N.float().abs() / (input_scale.float() * 2**29)


def static_parameters(
    weight: QuantizedWeight, input_scale: Tensor, input_offset: Tensor, bias_N: Tensor | None
) -> StaticParameters:
    """deq_scale = input_scale * weight_scale; quant_bias = round(bias / deq_scale) - input_offset * sum_K(weight)."""
    deq_scale = input_scale.float() * weight.scale
    correction = input_offset.to(torch.int64) * weight.values.sum(dim=1, dtype=torch.int64)
    quant_bias = -correction
    if bias_N is not None:
        quant_bias = torch.round(bias_N.double() / deq_scale.double()).to(torch.int64) - correction
    assert bool((quant_bias.abs() < 2**31).all()), (
        "a bias does not fit int32: apply least_scale_for_bias to the weight scale"
    )
    return StaticParameters(deq_scale, quant_bias.to(torch.int32))


def int8_matmul(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weight.T of int8 tensors, exact in int32 [T, N].

    Never through fp32: sums reach 128 * 128 * K = 3e8 at K = 18944, fp32 counts to 1.7e7.
    """
    if x_TK.device.type == "cpu":
        if _CPU_INT_MM_IS_EXACT:
            return torch._int_mm(x_TK, weight_NK.t())
        return x_TK.int() @ weight_NK.int().t()
    return (x_TK.double() @ weight_NK.double().t()).to(torch.int32)


def dequantize(
    acc_TN: Tensor, scale_N: Tensor, x_scale_T: Tensor | None, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """(acc + int32 bias) * scale * x_scale + float bias, in fp32 with one rounding to `out_dtype` at the end."""
    if bias_N is not None and bias_N.dtype == torch.int32:
        acc_TN = acc_TN + bias_N
    y = acc_TN.float() * scale_N.float()
    if x_scale_T is not None:
        y = y * x_scale_T.float()[:, None]
    if bias_N is not None and bias_N.dtype != torch.int32:
        y = y + bias_N.float()
    return y.to(out_dtype)


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    weight_scale_N: Tensor,
    x_scale_T: Tensor | None,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The quantized linear. Dynamic: weight_scale, x_scale, float bias. Static: deq_scale, None, int32 quant_bias."""
    return dequantize(int8_matmul(x_TK, weight_NK), weight_scale_N, x_scale_T, bias_N, out_dtype)


def round_up_to_bfloat16(x: Tensor) -> Tensor:
    """The smallest bfloat16 values >= x (positive, finite fp32), as fp32.

    Scales rounded so before quantizing lose nothing in a reader that keeps them in bfloat16 (vllm-ascend does).
    """
    bits = x.float().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def float32_bits(x: Tensor) -> Tensor:
    """Return int64 with the bits of fp32 in its low half, the form in which deq_scale is stored for fp16 models."""
    return x.float().view(torch.int32).to(torch.int64)


def _round_to_int8(x: Tensor, low: int = -INT8_MAX - 1) -> Tensor:
    return torch.round(x).clamp(low, INT8_MAX).to(torch.int8)


def _is_cpu_int_mm_exact() -> bool:
    # Some CPU kernels for int8 without VNNI add pairs of products in saturating int16.
    x = torch.full((2, 64), -128, dtype=torch.int8, device="cpu")
    x[1, ::2] = 127
    try:
        return torch.equal(torch._int_mm(x, x.t()), x.int() @ x.int().t())
    except (AttributeError, RuntimeError):
        return False


_CPU_INT_MM_IS_EXACT = _is_cpu_int_mm_exact()  # once, at import: compiled graphs cannot ask
