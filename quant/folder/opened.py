"""A quantized folder, opened and checked: description, files and config agree on every name before a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quant.errors import QuantizationError
from quant.folder.description import FLOAT, MIX, Description, read_description
from quant.folder.geometry import Geometry, read_geometry
from quant.folder.tensors import Slices, TensorFolder
from quant.names import LINEARS, LinearName, linear_of

REQUIRED = {
    "W8A8_DYNAMIC": ("weight", "weight_scale"),
    MIX: ("weight", "weight_scale"),
    "W8A8": ("weight", "input_scale", "input_offset", "deq_scale", "quant_bias"),
}
_OPTIONAL = ("weight_scale", "weight_offset", "bias")
_UNUSED = {MIX: ("input_scale", "input_offset", "deq_scale", "quant_bias")}  # by the static half
_NORM_BIAS = re.compile(r".*norm(\.module)?\.bias")
_NORM_COPY = re.compile(r".*norm\.module\.(weight|bias)")  # older msmodelslim writes norms twice


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    tensors: TensorFolder
    description: Description
    geometry: Geometry

    def scheme(self, linear: LinearName) -> str:
        """Return FLOAT, W8A8 or W8A8_DYNAMIC, as which W8A8_MIX is read.

        Raises QuantizationError if the merged parts differ or are not described.
        """
        found: dict[str, str] = {}
        for part in linear.checkpoint_names:
            key = f"{part}.weight"
            if key not in self.description.scheme_of:
                raise QuantizationError(f"{self.description.path}: {key!r} is missing; quantize the model again")
            found[part] = self.description.scheme_of[key]
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{part} {scheme}" for part, scheme in found.items())
            raise QuantizationError(f"{self.description.path}: {linear} mixes schemes ({listed}); quantize them alike")
        scheme = next(iter(found.values()))
        return "W8A8_DYNAMIC" if scheme == MIX else scheme

    def linears(self) -> list[LinearName]:
        return [LinearName(layer, kind) for layer in range(self.geometry.num_layers) for kind in LINEARS]

    def quantized_linears(self) -> list[LinearName]:
        return [linear for linear in self.linears() if self.scheme(linear) != FLOAT]


class FloatTensors:
    """The tensors outside a folder's quantized linears, by checkpoint name: embeddings, norms, lm_head, excluded
    linears.

    Serves as a source of the model's weight loader.
    """

    def __init__(self, opened: QuantizedFolder) -> None:
        quantized = {part for linear in opened.quantized_linears() for part in linear.checkpoint_names}
        self._tensors = opened.tensors
        self._names = {name for name in opened.tensors.names() if name.rpartition(".")[0] not in quantized}
        self._names -= {name for name in self._names if _NORM_BIAS.fullmatch(name) or _NORM_COPY.fullmatch(name)}

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def where(self, name: str) -> str:
        return self._tensors.where(name)

    def read(self, name: str, slices: Slices = ()) -> Tensor:
        return self._tensors.read(name, slices)


def open_folder(folder: str | Path) -> QuantizedFolder:
    """Open a folder. Raises QuantizationError naming file and tensor where it is damaged or not understood."""
    opened = QuantizedFolder(TensorFolder(folder), read_description(folder), read_geometry(folder))
    _check_same_names(opened)
    for name, scheme in opened.description.scheme_of.items():
        if scheme == FLOAT:
            _check_float_name(opened, name)
        elif not _NORM_COPY.fullmatch(name):
            _check_quantized_name(opened, name, scheme)
    for linear in opened.quantized_linears():
        _check_complete(opened, linear)
    for name in opened.tensors.names():
        if _NORM_BIAS.fullmatch(name) and opened.tensors.read(name).to(torch.float64).any():
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
        if name not in opened.tensors.names() and not (opened.geometry.is_tied and name == "lm_head.weight"):
            raise QuantizationError(f"{path}: {name!r} is described but in no file; copy the folder again")


def _check_quantized_name(opened: QuantizedFolder, name: str, scheme: str) -> None:
    module, _, suffix = name.rpartition(".")
    path, linear = opened.description.path, linear_of(module)
    if linear is None:
        smoothed = module.removesuffix(".linear")
        if smoothed != module and linear_of(smoothed) is not None:
            raise QuantizationError(
                f"{path}: {name!r}: its input is scaled by '{smoothed}.div.mul_scale' at run time (non-fusion "
                "smoothing), which is not supported; quantize again with smoothing that is fused into the weights"
            )
        raise QuantizationError(f"{path}: {name!r} is {scheme}; only the linears of decoder layers may be: exclude it")
    if linear.layer >= opened.geometry.num_layers:
        raise QuantizationError(
            f"{path}: {name!r}: config.json has {opened.geometry.num_layers} layers; correct either"
        )
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


def _check_complete(opened: QuantizedFolder, linear: LinearName) -> None:
    for part in linear.checkpoint_names:
        for suffix in REQUIRED[opened.scheme(linear)]:
            key = f"{part}.{suffix}"
            if key not in opened.description.scheme_of:
                raise QuantizationError(f"{opened.description.path}: {key!r} is missing; quantize the model again")
