"""The model with its weights on this process's device: float, quantized at load, or from a quantized folder.

The linears of decoder layers are quantized, and the head where the profile asks for it; embeddings and norms stay in
the profile's dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.checkpoint import ModelConfig, load_weights
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError
from common.model import Decoder, Ops, build_decoder
from common.processes import Mesh
from common.runtime.schemes import SCHEME_AT_LOAD
from quant.folder import float_tensors, load_quantized
from quant.layout import is_quantized_folder
from quant.linear import PLAIN_INT8, QuantKernels, install_linears, swap_linear, swap_linears

logger = logging.getLogger(__name__)

Tensors = dict[str, Tensor]


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads an engine's model.

    config: sizes of the model as it is built, which may pad those of the checkpoint. adapt: changes this rank's
    tensors, by our names, before they go to the device. quant_kernels: what computes quantized linears; None: plain
    operators. takes_experts: the engine quantizes mixtures of experts itself; else they are refused beside quantized
    linears.
    """

    profile: DeviceProfile
    run: RunConfig
    checkpoint_config: ModelConfig
    config: ModelConfig
    ops: Ops
    mesh: Mesh
    device: torch.device
    adapt: Callable[[Tensors], Tensors] = unchanged
    quant_kernels: QuantKernels | None = None
    takes_experts: bool = False

    def load(self) -> Decoder:
        """Load the model. Raises ConfigError, or QuantizationError naming file and tensor."""
        is_quantized = self.run.load_format == "auto" and is_quantized_folder(self.run.model)
        model = self._from_quantized_folder() if is_quantized else self._from_float()
        scheme = self.profile.quantization
        if self.profile.quantize_lm_head and scheme is not None:
            swap_linear(model, "lm_head", SCHEME_AT_LOAD[scheme], kernels=self.quant_kernels)
            logger.info("quantized lm_head as %s at load", SCHEME_AT_LOAD[scheme])
        return model

    def _from_float(self) -> Decoder:
        run, scheme = self.run, self.profile.quantization
        if scheme is not None and self.config.moe is not None and not self.takes_experts:
            raise ConfigError(
                f"profile {self.profile.name}: quantization {scheme} of a mixture of experts is not implemented: "
                "remove it"
            )
        weights = self._load_weights(
            lora_path=run.lora_path, load_format=run.load_format,
            device=self.device if run.load_format == "dummy" else "cpu",
        )  # fmt: skip
        model = self._build(weights)
        if scheme is not None:
            count = len(swap_linears(model, SCHEME_AT_LOAD[scheme], kernels=self.quant_kernels))
            logger.info(
                "quantized %d linears as %s at load, weights and activations without calibration",
                count, SCHEME_AT_LOAD[scheme],
            )  # fmt: skip
        return model

    def _from_quantized_folder(self) -> Decoder:
        run, profile = self.run, self.profile
        if profile.quantization != "w8a8":
            raise ConfigError(
                f"{run.model} is quantized to 8-bit integers, profile {profile.name} says quantization "
                f"{profile.quantization or 'null'}: add --set quantization=w8a8, or use the float checkpoint"
            )
        if run.lora_path is not None:
            raise ConfigError(
                f"{run.model} is quantized: merge {run.lora_path} first, by quantizing the float checkpoint"
            )
        quantized = load_quantized(run.model, self.mesh.tp_rank, self.mesh.tp_size)
        modules = {name.rpartition(".")[0] for name in quantized}
        without = [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]
        model = self._build(self._load_weights(source=float_tensors(run.model), without=without), without)
        on_device = {name: tensor.to(self.device) for name, tensor in self.adapt(quantized).items()}
        install_linears(model, on_device, self._dtype, self.quant_kernels or PLAIN_INT8)
        logger.info("loaded %d linears in 8-bit integers from %s", len(modules), run.model)
        return model

    def _load_weights(self, **options: Any) -> Tensors:
        return load_weights(
            self.run.model, self.checkpoint_config, tp_rank=self.mesh.tp_rank, tp_size=self.mesh.tp_size,
            dtype=self._dtype, **options,
        )  # fmt: skip

    def _build(self, weights: Tensors, without: Collection[str] = ()) -> Decoder:
        adapted = self.adapt(weights)
        if adapted is not weights:
            weights.clear()
        return build_decoder(
            self.config, self.ops, adapted, tp_rank=self.mesh.tp_rank, tp_size=self.mesh.tp_size, device=self.device,
            without=without,
        )  # fmt: skip

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.profile.dtype)
        return dtype
