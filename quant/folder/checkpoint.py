"""Quantized folders as a source of run-time tensors: merged, and cut for one tensor-parallel rank.

    folder (unmerged, [N, 1] scales) -> load_quantized -> layers.3.qkv_proj.weight, .weight_scale [N], ...
                                     -> float_tensors  -> everything else under its checkpoint name, for the loader

Reads what `quant.quantize` writes and what msmodelslim writes, dynamic and static, under old and new file names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from quant.errors import QuantizationError
from quant.folder.opened import NORM_BIAS, NORM_COPY, QuantizedFolder, open_folder
from quant.folder.tensors import Slices, shown
from quant.names import FLOATS, Layout, Linear, Part

_SHARED = ("input_scale", "input_offset")  # one value for all parts of a merged linear
_BIASES = ("bias", "quant_bias")  # where ranks' results are summed, one rank alone adds them


def load_quantized(
    folder: str | Path, layout: Layout, share: Sequence[Linear] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Read the quantized linears one after another, merged, on the CPU, by run-time name. Raises QuantizationError.

    `W8A8_DYNAMIC`: weight int8 [N, K], weight_scale fp32 [N], bias fp32 [N] if the layer has one; of experts weight
    [E, N, K] and weight_scale [E, N].
    `W8A8`: weight, weight_scale, deq_scale fp32 [N], quant_bias int32 [N], input_scale and input_offset fp32 [1].
    share: what a rank reads of the linears; None: all of them, whole.
    """
    opened = open_folder(folder, layout)
    quantized = {str(linear) for linear in opened.quantized_linears() if not linear.stays_float}
    for linear in layout.linears if share is None else share:
        if str(linear) in quantized:
            yield {f"{linear}.{suffix}": tensor for suffix, tensor in _read_linear(opened, linear).items()}


def schemes_of(folder: str | Path, layout: Layout) -> dict[str, str]:
    """Return FLOAT, W8A8 or W8A8_DYNAMIC of each of the running model's linears. Raises QuantizationError."""
    opened = open_folder(folder, layout)
    return {str(linear): "FLOAT" if linear.stays_float else opened.scheme(linear) for linear in layout.linears}


def float_tensors(folder: str | Path, layout: Layout) -> FloatTensors:
    """Return a source of what is read as floats. Raises QuantizationError."""
    return FloatTensors(open_folder(folder, layout))


class FloatTensors:
    """What is read as floats, by checkpoint name: embeddings, norms, lm_head, excluded linears, and shared experts,
    whose 8 bits are multiplied by their scales.

    Serves as a source of the model's weight loader.
    """

    def __init__(self, opened: QuantizedFolder) -> None:
        linears = opened.quantized_linears()
        quantized = {module for linear in linears for module in linear.modules}
        self._tensors = opened.tensors
        self._scaled = {
            f"{part.module}.weight": _Part(opened, part)
            for linear in linears if linear.stays_float for part in linear.parts
        }  # fmt: skip
        self._names = {name for name in opened.tensors.names() if name.rpartition(".")[0] not in quantized}
        self._names -= {name for name in self._names if NORM_BIAS.fullmatch(name) or NORM_COPY.fullmatch(name)}
        self._names |= self._scaled.keys()

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def where(self, name: str) -> str:
        return self._tensors.where(name)

    def read(self, name: str, slices: Slices = ()) -> Tensor:
        if name not in self._scaled:
            return self._tensors.read(name, slices)
        part = self._scaled[name]
        part.check_symmetric()
        scale_N1 = part.scales("weight_scale")[:, None]
        return part.read("weight", (torch.int8,), slices) * (scale_N1[slices[0]] if slices else scale_N1)


def _read_linear(opened: QuantizedFolder, linear: Linear) -> dict[str, Tensor]:
    parts = [_read_part(opened, linear, part) for part in linear.parts]
    merged = parts[0] if len(parts) == 1 else _merge(opened, linear, parts)
    if not linear.adds_bias:
        merged = {suffix: tensor for suffix, tensor in merged.items() if suffix not in _BIASES}
    if not linear.num_experts:
        return merged
    if "bias" in merged:
        raise QuantizationError(f"{opened.tensors.folder}: {linear}: has a bias, the model's experts have none")
    return {suffix: tensor.view(linear.num_experts, -1, *tensor.shape[1:]) for suffix, tensor in merged.items()}


def _merge(opened: QuantizedFolder, linear: Linear, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for suffix in sorted(set().union(*parts)):
        values = [part[suffix] for part in parts if suffix in part]
        if len(values) < len(parts):
            raise QuantizationError(f"{opened.tensors.folder}: {linear}: only some parts have {suffix}; quantize alike")
        if suffix not in _SHARED:
            merged[suffix] = torch.cat(values)
        elif all(torch.equal(value, values[0]) for value in values):
            merged[suffix] = values[0]
        else:
            listed = ", ".join(f"{value.item():g}" for value in values)
            raise QuantizationError(
                f"{opened.tensors.folder}: {linear}: parts differ in {suffix} ({listed}), but share one input; "
                "quantize them with one calibration"
            )
    return merged


def _read_part(opened: QuantizedFolder, linear: Linear, part: Part) -> dict[str, Tensor]:
    own = _Part(opened, part)
    own.check_shape("weight", (part.shape,))
    tensors = {"weight": own.read("weight", (torch.int8,), (part.rows, part.columns))}
    for suffix, tensor in (_static if opened.scheme(linear) == "W8A8" else _dynamic)(own).items():
        tensors[suffix] = tensor if suffix in _SHARED else tensor[part.rows].contiguous()
    return tensors


def _dynamic(part: _Part) -> dict[str, Tensor]:
    part.check_symmetric()
    tensors = {"weight_scale": part.scales("weight_scale")}
    if part.has("bias"):
        tensors["bias"] = part.finite("bias", part.channels("bias", FLOATS).float())
    return tensors


def _static(part: _Part) -> dict[str, Tensor]:
    """Read a static linear. The float bias, where a file has it, is left out: quant_bias holds it."""
    part.check_symmetric()
    input_scale, offset = part.one("input_scale"), part.one("input_offset")
    deq_scale = part.deq_scale()
    weight_scale = part.scales("weight_scale") if part.has("weight_scale") else deq_scale / input_scale
    if not input_scale > 0 or not -128 <= offset.item() <= 127 or offset.round() != offset:
        part.refuse(
            "input_scale", f"input_scale {input_scale.item():g} and input_offset {offset.item():g} make no int8"
        )
    # bfloat16 keeps 8 bits; a larger gap means that deq_scale was stored in another form than its dtype says
    if not torch.allclose(deq_scale, input_scale * weight_scale, rtol=2e-2, atol=0):
        part.refuse("deq_scale", "it is not input_scale * weight_scale")
    quant_bias = part.channels("quant_bias", (torch.int32,))
    return {
        "weight_scale": weight_scale,
        "input_scale": input_scale,
        "input_offset": offset,
        "deq_scale": deq_scale,
        "quant_bias": quant_bias,
    }


@dataclass(frozen=True, slots=True)
class _Part:
    """One linear of the checkpoint: reads its tensors and refuses wrong dtypes, shapes and values by name."""

    opened: QuantizedFolder
    part: Part

    @property
    def module(self) -> str:
        return self.part.module

    @property
    def num_out(self) -> int:
        return self.part.shape[0]

    def has(self, suffix: str) -> bool:
        return f"{self.module}.{suffix}" in self.opened.tensors.names()

    def refuse(self, suffix: str, reason: str) -> NoReturn:
        key = f"{self.module}.{suffix}"
        raise QuantizationError(f"{self.opened.tensors.where(key)}: {key}: {reason}; quantize or copy it again")

    def check_shape(self, suffix: str, allowed: Sequence[tuple[int, ...]]) -> None:
        shape = self.opened.tensors.shape(f"{self.module}.{suffix}")
        if shape not in allowed:
            wanted = " or ".join(str(list(each)) for each in allowed)
            self.refuse(suffix, f"shape {shown(list(shape))}, but config.json makes it {wanted}")

    def check_symmetric(self) -> None:
        if self.has("weight_offset") and self.channels("weight_offset", (*FLOATS, torch.int8)).any():
            self.refuse("weight_offset", "weights with an offset are not supported")

    def read(self, suffix: str, dtypes: Sequence[torch.dtype], slices: Slices = ()) -> Tensor:
        tensor = self.opened.tensors.read(f"{self.module}.{suffix}", slices)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.refuse(suffix, f"dtype {str(tensor.dtype).removeprefix('torch.')}, expected {wanted}")
        return tensor

    def channels(self, suffix: str, dtypes: Sequence[torch.dtype]) -> Tensor:
        self._check_not_grouped(suffix)
        self.check_shape(suffix, ((self.num_out,), (self.num_out, 1)))
        return self.read(suffix, dtypes).flatten()

    def _check_not_grouped(self, suffix: str) -> None:
        key = f"{self.module}.{suffix}"
        shape = self.opened.tensors.shape(key)
        if len(shape) == 2 and shape[0] == self.num_out and shape[1] > 1:
            raise QuantizationError(
                f"{self.opened.tensors.where(key)}: {key}: shape {shown(list(shape))}, a scale for each of {shape[1]} "
                "groups of inputs; only one for each output is supported: quantize again per channel (group_size 0)"
            )

    def scales(self, suffix: str) -> Tensor:
        return self._positive(suffix, self.channels(suffix, FLOATS).float())

    def one(self, suffix: str) -> Tensor:
        self.check_shape(suffix, ((1,), ()))
        return self.read(suffix, (*FLOATS, torch.int8, torch.int32)).float().reshape(1)

    def deq_scale(self) -> Tensor:
        """Read deq_scale as fp32; files of fp16 models have the same bits in the low half of int64."""
        stored = self.channels("deq_scale", (torch.float32, torch.int64))
        if stored.dtype == torch.int64:
            if bool(((stored < 0) | (stored >= 2**31)).any()):
                self.refuse("deq_scale", "its int64 values are not the bits of positive fp32 numbers")
            stored = stored.to(torch.int32).view(torch.float32)
        return self._positive("deq_scale", stored)

    def finite(self, suffix: str, tensor: Tensor) -> Tensor:
        if not bool(torch.isfinite(tensor).all()):
            self.refuse(suffix, "holds NaN or infinite values")
        return tensor

    def _positive(self, suffix: str, scale: Tensor) -> Tensor:
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            self.refuse(suffix, "holds negative, infinite or NaN scales")
        return scale
