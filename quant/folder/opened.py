"""A quantized folder, opened and checked: description, files and config agree on every name before a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quant.errors import QuantizationError
from quant.folder.description import FLOAT, MIX, Description, read_description
from quant.folder.tensors import TensorFolder
from quant.names import Layout, Linear

REQUIRED = {
    "W8A8_DYNAMIC": ("weight", "weight_scale"),
    MIX: ("weight", "weight_scale"),
    "W8A8": ("weight", "input_scale", "input_offset", "deq_scale", "quant_bias"),
}
_OPTIONAL = ("weight_scale", "weight_offset", "bias")
_UNUSED = {MIX: ("input_scale", "input_offset", "deq_scale", "quant_bias")}  # by the static half
NORM_BIAS = re.compile(r".*norm(\.module)?\.bias")
NORM_COPY = re.compile(r".*norm\.module\.(weight|bias)")  # older msmodelslim writes norms twice


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    tensors: TensorFolder
    description: Description
    layout: Layout

    def scheme(self, linear: Linear) -> str:
        """Return FLOAT, W8A8 or W8A8_DYNAMIC, as which W8A8_MIX is read.

        Raises QuantizationError if the merged parts differ or are not described.
        """
        path, found = self.description.path, dict[str, str]()
        for module in linear.modules:
            key = f"{module}.weight"
            if key not in self.description.scheme_of:
                raise QuantizationError(f"{path}: {key!r} is missing; quantize the model again")
            scheme = self.description.scheme_of[key]
            found.setdefault("W8A8_DYNAMIC" if scheme == MIX else scheme, module)
        if len(found) > 1:
            listed = ", ".join(f"{module} {scheme}" for scheme, module in found.items())
            raise QuantizationError(f"{path}: {linear} mixes schemes ({listed}); quantize them alike")
        (scheme,) = found
        if scheme == "W8A8" and (linear.num_experts or linear.stays_float):
            raise QuantizationError(
                f"{path}: {linear} is W8A8, with static inputs; experts are read as W8A8_DYNAMIC or FLOAT: quantize "
                "them again"
            )
        return scheme

    def quantized_linears(self) -> list[Linear]:
        return [linear for linear in self.layout.linears if self.scheme(linear) != FLOAT]


def open_folder(folder: str | Path, layout: Layout) -> QuantizedFolder:
    """Open a folder. Raises QuantizationError naming file and tensor where it is damaged or not understood."""
    opened = QuantizedFolder(TensorFolder(folder), read_description(folder), layout)
    _check_same_names(opened)
    linear_of = layout.of_modules()
    for name, scheme in opened.description.scheme_of.items():
        if scheme == FLOAT:
            _check_float_name(opened, name)
        elif not NORM_COPY.fullmatch(name):
            _check_quantized_name(opened, name, scheme, linear_of)
    for linear in opened.quantized_linears():
        _check_complete(opened, linear)
    for name in opened.tensors.names():
        if NORM_BIAS.fullmatch(name) and opened.tensors.read(name).to(torch.float64).any():
            raise QuantizationError(
                f"{opened.tensors.where(name)}: {name}: the model's norms have no bias; "
                "quantize again without outlier suppression that shifts activations"
            )
    return opened


def _check_same_names(opened: QuantizedFolder) -> None:
    described, path = opened.description.scheme_of, opened.description.path
    for name in opened.tensors.names():
        if name not in described:
            raise QuantizationError(f"{path}: {name!r} is in the files but not described; quantize the model again")
    for name in described:
        if name not in opened.tensors.names() and name != opened.layout.tied_head:
            raise QuantizationError(f"{path}: {name!r} is described but in no file; copy the folder again")


def _check_quantized_name(opened: QuantizedFolder, name: str, scheme: str, linear_of: Mapping[str, Linear]) -> None:
    module, _, suffix = name.rpartition(".")
    path, layout = opened.description.path, opened.layout
    if module not in linear_of:
        layer = layout.layer_of(name)
        if layer is not None and layer >= layout.num_layers:
            raise QuantizationError(f"{path}: {name!r}: config.json has {layout.num_layers} layers; correct either")
        smoothed = module.removesuffix(".linear")
        if smoothed != module and smoothed in linear_of:
            raise QuantizationError(
                f"{path}: {name!r}: its input is scaled by '{smoothed}.div.mul_scale' at run time (non-fusion "
                "smoothing), which is not supported; quantize again with smoothing that is fused into the weights"
            )
        raise QuantizationError(f"{path}: {name!r} is {scheme}; only the linears of decoder layers may be: exclude it")
    if suffix not in (*REQUIRED[scheme], *_OPTIONAL, *_UNUSED.get(scheme, ())):
        raise QuantizationError(f"{path}: {name!r}: {suffix} is not part of {scheme}; quantize without this feature")
    of_weight = opened.description.scheme_of.get(f"{module}.weight")
    if of_weight is None:
        raise QuantizationError(f"{path}: '{module}.weight' is missing; quantize the model again")
    if of_weight != scheme:
        raise QuantizationError(
            f"{path}: {name!r} is {scheme}, but its weight is {of_weight}; quantize the model again"
        )


def _check_float_name(opened: QuantizedFolder, name: str) -> None:
    """Refuse what stands beside a quantized weight and is no part of it: computing without it would give other answers.
    What stands elsewhere is for the loader to know."""
    module, _, suffix = name.rpartition(".")
    scheme = opened.description.scheme_of.get(f"{module}.weight", FLOAT)
    if scheme != FLOAT and suffix not in (*REQUIRED[scheme], *_OPTIONAL, *_UNUSED.get(scheme, ())):
        raise QuantizationError(
            f"{opened.tensors.where(name)}: {name}: nothing reads it, and the quantized weight beside it may need it, "
            "such as an online rotation; quantize without this feature"
        )


def _check_complete(opened: QuantizedFolder, linear: Linear) -> None:
    for module in linear.modules:
        for suffix in REQUIRED[opened.scheme(linear)]:
            key = f"{module}.{suffix}"
            if key not in opened.description.scheme_of:
                raise QuantizationError(f"{opened.description.path}: {key!r} is missing; quantize the model again")
