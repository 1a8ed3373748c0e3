"""Smoothing (SmoothQuant, arXiv 2211.10438): move the activations' outliers into the weights before quantizing.

Channel j of a linear's input is divided by s_j = max|x_j|^a / max|w_j|^(1-a) and column j of its weight multiplied by
it. The division is folded into what produces the input: the norm before qkv and gate/up, the rows of v before o, the
rows of up before down. s is rounded to a power of two, so that every product is exact and the float model computes
what it did before.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from quant.calibration.calibrate import ActivationRange, Calibration
from quant.errors import QuantizationError
from quant.names import Layout, Linear

# In this order: the scales of qkv and gate_up then see v and up as they will be quantized.
_PRODUCER = {
    "o_proj": "self_attn.v_proj",
    "down_proj": "mlp.up_proj",
    "qkv_proj": "input_layernorm",
    "gate_up_proj": "post_attention_layernorm",
}
_MAX_OCTAVES = 8  # bounds what a channel that calibration hardly saw can do


def smoothing_scale(x_absmax_K: Tensor, weight_absmax_K: Tensor, alpha: float) -> Tensor:
    """Return powers of two, fp32 [K]; 1 where a channel's activations or weights are all zero."""
    scale = x_absmax_K.float() ** alpha / weight_absmax_K.float() ** (1 - alpha)
    is_used = (x_absmax_K > 0) & (weight_absmax_K > 0)
    octaves = torch.log2(torch.where(is_used, scale, 1.0)).round()
    return torch.exp2(octaves.clamp(-_MAX_OCTAVES, _MAX_OCTAVES))


def smooth_layer(
    tensors: dict[str, Tensor], linears: Collection[Linear], calibration: Calibration, layout: Layout, alpha: float
) -> dict[Linear, ActivationRange]:
    """Smooth these linears of one layer in place, in checkpoint tensors; returns the ranges of their new inputs.

    Other linears stay float-equivalent too, so excluded ones may be left out. Raises QuantizationError if a producer
    is missing or a linear was not calibrated.
    """
    ranges: dict[Linear, ActivationRange] = {}
    for linear in sorted(linears, key=lambda each: list(_PRODUCER).index(each.kind)):
        own = calibration.of(str(linear))
        weights = [f"{module}.weight" for module in linear.modules]
        weight_absmax = torch.stack([tensors[key].float().abs().amax(dim=0) for key in weights]).amax(dim=0)
        if own.absmax.shape != weight_absmax.shape:
            raise QuantizationError(
                f"{linear}: calibrated with {len(own.absmax)} channels, but the weight has {len(weight_absmax)}: "
                "calibrate this model with tensor_parallel_size 1"
            )
        heads = _Heads(layout, is_shared=linear.kind == "o_proj")
        scale = smoothing_scale(heads.shared_max(own.absmax), heads.shared_max(weight_absmax), alpha)
        _divide_rows(tensors, layout.layer.format(i=linear.layer) + _PRODUCER[linear.kind], scale)
        scale_K = heads.repeat(scale)
        for key in weights:
            tensors[key] = tensors[key] * scale_K.to(tensors[key].dtype)
        ranges[linear] = own.divided(scale_K)
    return ranges


class _Heads:
    """Input channels of o that come from one channel of v: those of all query heads in its group."""

    def __init__(self, layout: Layout, is_shared: bool) -> None:
        self._shape = (layout.num_kv_heads, layout.num_heads // layout.num_kv_heads, layout.head_size)
        self._is_shared = is_shared

    def shared_max(self, channels_K: Tensor) -> Tensor:
        return channels_K.reshape(self._shape).amax(dim=1).flatten() if self._is_shared else channels_K

    def repeat(self, scale: Tensor) -> Tensor:
        if not self._is_shared:
            return scale
        num_kv_heads, _, head_size = self._shape
        return scale.reshape(num_kv_heads, 1, head_size).expand(self._shape).flatten()


def _divide_rows(tensors: dict[str, Tensor], producer: str, scale: Tensor) -> None:
    if f"{producer}.weight" not in tensors:
        raise QuantizationError(f"{producer}.weight is in no file: smoothing knows Qwen2's layout only; leave it out")
    for key in (f"{producer}.weight", f"{producer}.bias"):
        if key in tensors:
            divisor = scale.to(tensors[key].dtype)
            tensors[key] = tensors[key] / (divisor[:, None] if tensors[key].dim() == 2 else divisor)
