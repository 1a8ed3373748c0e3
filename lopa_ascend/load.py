"""The model of this engine: what `common.runtime.weights` makes, laid out for Ascend's operators.

Ascend's attention takes heads of 128 values. Its rotation turns whole heads and pairs i with i + 64. So the values of
every head are laid out anew here, in the weights: rotated pairs lie 64 apart, values that are not rotated lie where the
angle is zero, and smaller heads are padded with zeros. Every model then runs through the same operators. The order of a
head's values changes neither a score nor a sum, and zeros change no quantization scale. A norm over a padded head
divides by 128 instead of the head's size: `attention_scale` and `match_padded_norms` make up for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from common.checkpoint import ModelConfig
from common.config import DeviceProfile, RunConfig
from common.model import Decoder
from common.processes import Mesh
from common.runtime import ModelLoader
from lopa_ascend.ops import Ops
from lopa_ascend.stages import (
    AscendStages,
    as_parameters,
    lay_out_experts,
    link_linears,
    prepare_linears,
    put_columns_last,
    quant_kernels,
)
from quant.linear import QuantizedLinear

logger = logging.getLogger(__name__)

HEAD_SIZE = 128
# The dimension that holds heads, by parameter; a padded output channel's scale is never used, but may not be 0.
_HEAD_DIMENSION = {
    **{f"qkv_proj.{leaf}": 0 for leaf in ("weight", "bias", "weight_scale", "deq_scale", "quant_bias")},
    **{f"qk_norm.{leaf}": 0 for leaf in ("q_weight", "k_weight")},
    "o_proj.weight": 1,
}
_ONE_WHERE_PADDED = ("weight_scale", "deq_scale")


def loader_of(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, stages: AscendStages, ops: Ops, mesh: Mesh,
    device: torch.device,
) -> ModelLoader:  # fmt: skip
    """Return what reads weights and lays them out."""
    padded = replace(config, head_size=HEAD_SIZE)
    return ModelLoader(
        profile, run, config, padded, stages, mesh, device, adapt=partial(lay_out_heads, config=config),
        quant_kernels=quant_kernels(ops), lay_out=partial(lay_out, ops=ops, profile=profile), can_write=is_plain,
    )  # fmt: skip


def load_model(loader: ModelLoader) -> Decoder:
    """Load the model and lay its weights out. Raises ConfigError, or QuantizationError naming file and tensor."""
    model = loader.load()
    match_padded_norms(model, loader.checkpoint_config)
    link_linears(model)
    num_quantized = sum(isinstance(module, QuantizedLinear) for module in model.modules())
    num_mixtures = sum(layer.moe is not None for layer in model.layers)
    if num_quantized:
        logger.info("%d linears in 8-bit integers", num_quantized)
    if num_quantized and num_mixtures:
        logger.info(
            "the experts of %d layers in 8-bit integers; their routers are in float32, their shared experts in %s",
            num_mixtures, loader.profile.dtype,
        )  # fmt: skip
    return model


def is_plain(tensor: Tensor) -> bool:
    """Whether a weight lies in the plain layout: those in FRACTAL_NZ, which is for 8 bits here, are never written."""
    return tensor.dtype != torch.int8


def lay_out(part: nn.Module, ops: Ops, profile: DeviceProfile) -> None:
    """Lay the weights of a model, or of a part of it, out as the operators read them."""
    prepare_linears(part, ops)
    lay_out_experts(part)
    if profile.graph.mode == "torchair":
        put_columns_last(part)
        as_parameters(part)


def attention_scale(config: ModelConfig) -> float:
    """The scale of attention's scores: that of the true head size. Normed heads that are padded to HEAD_SIZE come out
    longer by sqrt(HEAD_SIZE / head size), queries and keys both."""
    is_longer = config.qk_norm
    return float(config.head_size**-0.5) * (config.head_size / HEAD_SIZE if is_longer else 1.0)


def match_padded_norms(model: Decoder, config: ModelConfig) -> None:
    """Lower what is added to the mean over a padded head, which is smaller by head size / HEAD_SIZE."""
    for layer in model.layers:
        if layer.qk_norm is not None:
            layer.qk_norm.eps *= config.head_size / HEAD_SIZE


def lay_out_heads(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return parameters by our names, with heads of HEAD_SIZE whose rotated pairs lie half of it apart."""
    place_H = head_places(config.head_size, config.rotary_size)
    if torch.equal(place_H, torch.arange(HEAD_SIZE)):
        return dict(tensors)
    return {name: _laid_out(name, tensor, place_H) for name, tensor in tensors.items()}


def head_places(head_size: int, rotary_size: int) -> Tensor:
    """Return where each value of a head lies among HEAD_SIZE, [head_size]: pairs first in both halves, then what is not
    rotated."""
    num_pairs, half = rotary_size // 2, HEAD_SIZE // 2
    pairs, others = torch.arange(num_pairs), torch.arange(num_pairs, half)
    free = torch.cat((others, half + others))
    return torch.cat((pairs, half + pairs, free[: head_size - rotary_size]))


def _laid_out(name: str, tensor: Tensor, place_H: Tensor) -> Tensor:
    module, _, leaf = name.rpartition(".")
    dimension = _HEAD_DIMENSION.get(f"{module.rpartition('.')[2]}.{leaf}")
    if dimension is None:
        return tensor
    num_heads = tensor.shape[dimension] // len(place_H)
    place = (torch.arange(num_heads)[:, None] * HEAD_SIZE + place_H).flatten().to(tensor.device)
    shape = list(tensor.shape)
    shape[dimension] = num_heads * HEAD_SIZE
    laid_out = tensor.new_full(shape, 1 if leaf in _ONE_WHERE_PADDED else 0)
    return laid_out.index_copy_(dimension, place, tensor)
