"""The model with its weights on this process's device: float, quantized at load, or from a quantized folder.

The linears and experts of decoder layers are quantized, and the head where the profile asks for it; embeddings, norms,
routers and shared experts stay floats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from common.checkpoint import ModelConfig, load_weights, quantizable
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError
from common.model import Decoder, Ops, build_decoder
from common.processes import Mesh
from common.runtime.weights.schemes import SCHEME_AT_LOAD
from quant.experts import install_experts, swap_experts
from quant.folder import float_tensors, load_quantized
from quant.layout import is_quantized_folder
from quant.linear import PLAIN_INT8, QuantizedLinear, QuantKernels, install_linears, swap_linear, swap_linears

logger = logging.getLogger(__name__)

Tensors = dict[str, Tensor]


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


def as_it_is(part: nn.Module) -> None:
    pass


def anywhere(tensor: Tensor) -> bool:
    return True


class Origin(NamedTuple):
    """Where weights come from: a folder, in which a LoRA may be merged, or tensors by the checkpoint's names."""

    folder: str
    load_format: Literal["auto", "dummy"] = "auto"
    lora_path: str | None = None
    tensors: Mapping[str, Tensor] | None = None

    @property
    def is_quantized(self) -> bool:
        return self.tensors is None and self.load_format == "auto" and is_quantized_folder(self.folder)


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads an engine's model.

    config: sizes of the model as it is built, which may pad those of the checkpoint. adapt: changes this rank's
    tensors, by our names, before they go to the device. quant_kernels: what computes quantized linears; None: plain
    operators. lay_out: lays the final weights of a model, or of a part of it, out as the engine's operators read them.
    can_write: whether a tensor that was laid out may be written to; else it is another one that takes its place.
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
    lay_out: Callable[[nn.Module], None] = as_it_is
    can_write: Callable[[Tensor], bool] = anywhere

    @property
    def origin(self) -> Origin:
        """What the run names."""
        return Origin(self.run.model, self.run.load_format, self.run.lora_path)

    def load(self) -> Decoder:
        """Load the model that the run names. Raises ConfigError, or QuantizationError naming file and tensor."""
        model = self.read(self.origin, self.device)
        self.complete(model, self.origin)
        if self.profile.quantization is not None and not self.origin.is_quantized:
            logger.info(
                "quantized %d linears as %s at load, weights and activations without calibration",
                sum(isinstance(module, QuantizedLinear) for module in model.modules()),
                SCHEME_AT_LOAD[self.profile.quantization],
            )
        return model

    def read(self, origin: Origin, device: torch.device) -> Decoder:
        """Read a model into the memory of `device`; linears that a folder holds in 8 bits are so, all others are
        floats. Raises as `load` does."""
        return self._from_quantized_folder(origin, device) if origin.is_quantized else self._from_float(origin, device)

    def complete(self, part: nn.Module, origin: Origin) -> None:
        """Quantize the linears and experts of a model that was read, or of a part of it, as the profile asks, and lay
        them out."""
        scheme = self.profile.quantization
        if scheme is not None and not origin.is_quantized:
            swap_linears(part, SCHEME_AT_LOAD[scheme], kernels=self.quant_kernels)
            swap_experts(part, SCHEME_AT_LOAD[scheme])
        if scheme is not None and self.profile.quantize_lm_head and hasattr(part, "lm_head"):
            swap_linear(part, "lm_head", SCHEME_AT_LOAD[scheme], kernels=self.quant_kernels)
        self.lay_out(part)

    def _from_float(self, origin: Origin, device: torch.device) -> Decoder:
        weights = self._load_weights(
            origin.folder, lora_path=origin.lora_path, load_format=origin.load_format, tensors=origin.tensors,
            device=device if origin.load_format == "dummy" else "cpu",
        )  # fmt: skip
        return self._build(weights, device)

    def _from_quantized_folder(self, origin: Origin, device: torch.device) -> Decoder:
        folder, profile = origin.folder, self.profile
        if profile.quantization != "w8a8":
            raise ConfigError(
                f"{folder} is quantized to 8-bit integers, profile {profile.name} says quantization "
                f"{profile.quantization or 'null'}: add --set quantization=w8a8, or use the float checkpoint"
            )
        if origin.lora_path is not None:
            raise ConfigError(
                f"{folder} is quantized: merge {origin.lora_path} first, by quantizing the float checkpoint"
            )
        config, mesh = self.checkpoint_config, self.mesh
        layout, share = quantizable(config), quantizable(config, mesh.tp_rank, mesh.tp_size).linears
        on_device: Tensors = {}
        for linear in load_quantized(folder, layout, share):
            on_device |= {name: tensor.to(device) for name, tensor in self.adapt(linear).items()}
        modules = {name.rpartition(".")[0] for name in on_device}
        without = [*modules, *(f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias"))]
        floats = self._load_weights(folder, source=float_tensors(folder, layout), without=without)
        model = self._build(floats, device, without)
        experts = {f"{linear}.{leaf}" for linear in share if linear.num_experts for leaf in ("weight", "weight_scale")}
        install_experts(model, {name: on_device.pop(name) for name in experts & on_device.keys()})
        install_linears(model, on_device, self._dtype, self.quant_kernels or PLAIN_INT8)
        logger.info("loaded %d linears and mixtures in 8-bit integers from %s", len(modules), folder)
        return model

    def _load_weights(self, folder: str, **options: Any) -> Tensors:
        return load_weights(
            folder, self.checkpoint_config, tp_rank=self.mesh.tp_rank, tp_size=self.mesh.tp_size,
            dtype=self._dtype, **options,
        )  # fmt: skip

    def _build(self, weights: Tensors, device: torch.device, without: Collection[str] = ()) -> Decoder:
        adapted = self.adapt(weights)
        if adapted is not weights:
            weights.clear()
        return build_decoder(
            self.config, self.ops, adapted, tp_rank=self.mesh.tp_rank, tp_size=self.mesh.tp_size, device=device,
            without=without,
        )  # fmt: skip

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.profile.dtype)
        return dtype
