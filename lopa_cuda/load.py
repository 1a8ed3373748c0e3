"""The model with its weights on this process's device: plain, quantized at load, or from a quantized folder.

Only the linears of decoder layers are quantized; embeddings, norms and the head stay in the profile's dtype.
"""

from __future__ import annotations

import logging

import torch

from common.config import ConfigError, DeviceProfile, RunConfig
from common.launch import Mesh
from common.models.config import ModelConfig
from common.models.dream import Dream, build_dream
from common.weights import load_weights
from lopa_cuda.ops import CudaOps
from quant.checkpoint import float_tensors, is_quantized_folder, load_quantized
from quant.linear import install_linears, swap_linears

logger = logging.getLogger(__name__)

_SCHEME_AT_LOAD = {"w8a8": "w8a8_dynamic", "fp8": "fp8"}


def load_model(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, ops: CudaOps, mesh: Mesh, device: torch.device
) -> Dream:
    """Raises ConfigError, or QuantizationError naming file and tensor."""
    if run.load_format == "auto" and is_quantized_folder(run.model):
        model = _from_quantized_folder(profile, run, config, ops, mesh, device)
    else:
        model = _from_float(profile, run, config, ops, mesh, device)
    ops.adopt(model)
    return model


def _from_float(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, ops: CudaOps, mesh: Mesh, device: torch.device
) -> Dream:
    weights = load_weights(
        run.model, config, tp_rank=mesh.tp_rank, tp_size=mesh.tp_size, dtype=getattr(torch, profile.dtype),
        lora_path=run.lora_path, load_format=run.load_format, device=device if run.load_format == "dummy" else "cpu",
    )  # fmt: skip
    model = build_dream(config, ops, weights, tp_rank=mesh.tp_rank, tp_size=mesh.tp_size, device=device)
    if profile.quantization is not None:
        scheme = _SCHEME_AT_LOAD[profile.quantization]
        count = len(swap_linears(model, scheme))
        logger.info("quantized %d linears as %s at load, weights and activations without calibration", count, scheme)
    return model


def _from_quantized_folder(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, ops: CudaOps, mesh: Mesh, device: torch.device
) -> Dream:
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
    model = build_dream(
        config, ops, weights, tp_rank=mesh.tp_rank, tp_size=mesh.tp_size, device=device, without=without
    )
    install_linears(model, {name: tensor.to(device) for name, tensor in quantized.items()}, dtype)
    logger.info("loaded %d linears in 8-bit integers from %s", len(modules), run.model)
    return model
