"""The model of this engine: what `common.runtime.load` makes, laid out for Ascend's operators.

Ascend's attention takes heads of 128 values. Smaller heads are padded with zeros here, in the weights, so that every
model runs through the same operators: zeros change neither a score nor a sum, and no quantization scale.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from common.checkpoint import ModelConfig
from common.config import DeviceProfile, RunConfig
from common.model import Dream
from common.processes import Mesh
from common.runtime import ModelLoader
from lopa_ascend.ops import Ops
from lopa_ascend.stages import (
    AscendStages,
    as_parameters,
    link_linears,
    prepare_linears,
    put_columns_last,
    quant_kernels,
)

logger = logging.getLogger(__name__)

HEAD_SIZE = 128
# The dimension that holds heads, by parameter; a padded output channel's scale is never used, but may not be 0.
_HEAD_DIMENSION = {
    **{f"qkv_proj.{leaf}": 0 for leaf in ("weight", "bias", "weight_scale", "deq_scale", "quant_bias")},
    "o_proj.weight": 1,
}
_ONE_WHERE_PADDED = ("weight_scale", "deq_scale")


def load_model(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, stages: AscendStages, ops: Ops, mesh: Mesh,
    device: torch.device,
) -> Dream:  # fmt: skip
    """Raises ConfigError, or QuantizationError naming file and tensor."""
    padded = replace(config, head_size=HEAD_SIZE)
    model = ModelLoader(
        profile, run, config, padded, stages, mesh, device, adapt=partial(pad_heads, head_size=config.head_size),
        quant_kernels=quant_kernels(ops),
    ).load()  # fmt: skip
    num_quantized = prepare_linears(model, ops)
    if profile.graph.mode == "torchair" and not profile.enforce_eager:
        put_columns_last(model)
        as_parameters(model)
    link_linears(model)
    if num_quantized:
        logger.info("%d linears in 8-bit integers", num_quantized)
    return model


def pad_heads(tensors: Mapping[str, Tensor], head_size: int) -> dict[str, Tensor]:
    """Parameters by our names, with heads of HEAD_SIZE. A rotated pair (i, i + half) stays a pair of its head."""
    if head_size == HEAD_SIZE:
        return dict(tensors)
    return {name: _padded(name, tensor, head_size) for name, tensor in tensors.items()}


def _padded(name: str, tensor: Tensor, head_size: int) -> Tensor:
    module, _, leaf = name.rpartition(".")
    dimension = _HEAD_DIMENSION.get(f"{module.rpartition('.')[2]}.{leaf}")
    if dimension is None:
        return tensor
    num_heads = tensor.shape[dimension] // head_size
    place_H = torch.arange(head_size)
    place_H[head_size // 2 :] += (HEAD_SIZE - head_size) // 2
    place = (torch.arange(num_heads)[:, None] * HEAD_SIZE + place_H).flatten().to(tensor.device)
    shape = list(tensor.shape)
    shape[dimension] = num_heads * HEAD_SIZE
    padded = tensor.new_full(shape, 1 if leaf in _ONE_WHERE_PADDED else 0)
    return padded.index_copy_(dimension, place, tensor)
