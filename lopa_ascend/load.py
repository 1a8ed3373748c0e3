"""The model with its weights on this process's device: float, quantized at load, or from a quantized folder.

Ascend's attention takes heads of 128 values. Smaller heads are padded with zeros here, in the weights, so that every
model runs through the same operators: zeros change neither a score nor a sum, and no quantization scale.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from common.config import ConfigError, DeviceProfile, RunConfig
from common.launch import Mesh
from common.models.config import ModelConfig
from common.models.dream import Dream, build_dream
from common.weights import load_weights
from lopa_ascend.ops import Ops
from lopa_ascend.stages import (
    AscendStages,
    as_parameters,
    link_linears,
    prepare_linears,
    put_columns_last,
    quant_kernels,
)
from quant.checkpoint import float_tensors, is_quantized_folder, load_quantized
from quant.linear import install_linears, swap_linears

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
    if run.load_format == "auto" and is_quantized_folder(run.model):
        model = _from_quantized_folder(profile, run, config, stages, ops, mesh, device)
    else:
        model = _from_float(profile, run, config, stages, ops, mesh, device)
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


def _from_float(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, stages: AscendStages, ops: Ops, mesh: Mesh,
    device: torch.device,
) -> Dream:  # fmt: skip
    weights = load_weights(
        run.model, config, tp_rank=mesh.tp_rank, tp_size=mesh.tp_size, dtype=getattr(torch, profile.dtype),
        lora_path=run.lora_path, load_format=run.load_format, device=device if run.load_format == "dummy" else "cpu",
    )  # fmt: skip
    model = _build(config, stages, weights, mesh, device)
    if profile.quantization == "w8a8":
        swap_linears(model, "w8a8_dynamic", kernels=quant_kernels(ops))
    return model


def _from_quantized_folder(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, stages: AscendStages, ops: Ops, mesh: Mesh,
    device: torch.device,
) -> Dream:  # fmt: skip
    if profile.quantization != "w8a8":
        raise ConfigError(
            f"{run.model} is quantized to 8-bit integers, profile {profile.name} says quantization "
            f"{profile.quantization}: set it to w8a8, or use the float checkpoint"
        )
    if run.lora_path is not None:
        raise ConfigError(f"{run.model} is quantized: merge {run.lora_path} first, by quantizing the float checkpoint")
    dtype = getattr(torch, profile.dtype)
    quantized = load_quantized(run.model, mesh.tp_rank, mesh.tp_size)
    modules = {name.rpartition(".")[0] for name in quantized}
    without = [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]
    weights = load_weights(
        run.model, config, tp_rank=mesh.tp_rank, tp_size=mesh.tp_size, dtype=dtype,
        source=float_tensors(run.model), without=without,
    )  # fmt: skip
    model = _build(config, stages, weights, mesh, device, without)
    on_device = {name: tensor.to(device) for name, tensor in pad_heads(quantized, config.head_size).items()}
    install_linears(model, on_device, dtype, quant_kernels(ops))
    return model


def _build(
    config: ModelConfig, stages: AscendStages, weights: dict[str, Tensor], mesh: Mesh, device: torch.device,
    without: list[str] | None = None,
) -> Dream:  # fmt: skip
    padded = pad_heads(weights, config.head_size)
    weights.clear()
    return build_dream(
        replace(config, head_size=HEAD_SIZE), stages, padded, tp_rank=mesh.tp_rank, tp_size=mesh.tp_size,
        device=device, without=without or (),
    )  # fmt: skip
