"""Quantized folders as a source of run-time tensors: merged, and cut for one tensor-parallel rank.

    folder (unmerged, [N, 1] scales) -> load_quantized -> layers.3.qkv_proj.weight, .weight_scale [N], ...
                                     -> float_tensors  -> everything else under its checkpoint name, for the loader

Reads what `quant.quantize` writes and what msmodelslim writes, dynamic and static, under old and new file names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from quant.errors import QuantizationError
from quant.folder.description import read_description
from quant.folder.opened import FloatTensors, QuantizedFolder, open_folder
from quant.folder.tensors import Slices, shown
from quant.names import FLOATS, LINEARS, LinearName

__all__ = ["float_tensors", "load_quantized", "read_description", "schemes_of"]

_SHARED = ("input_scale", "input_offset")  # one value for all parts of a merged linear
_ON_RANK_0 = ("bias", "quant_bias")  # in row-parallel linears: the ranks' results are summed, a bias must join once


def load_quantized(folder: str | Path, tp_rank: int = 0, tp_size: int = 1) -> dict[str, Tensor]:
    """One rank's quantized linears, merged, on the CPU, by run-time name. Raises QuantizationError.

    `W8A8_DYNAMIC`: weight int8 [N, K], weight_scale fp32 [N], bias fp32 [N] if the layer has one.
    `W8A8`: weight, weight_scale, deq_scale fp32 [N], quant_bias int32 [N], input_scale and input_offset fp32 [1].
    N is cut for qkv_proj and gate_up_proj, K for o_proj and down_proj; biases of the latter are on rank 0 only.
    """
    opened = open_folder(folder)
    opened.geometry.check_tensor_parallel(tp_size)
    if not 0 <= tp_rank < tp_size:
        raise QuantizationError(f"tp_rank {tp_rank} is not in 0..{tp_size - 1}: pass the process's rank on the tp axis")
    loaded: dict[str, Tensor] = {}
    for linear in opened.quantized_linears():
        parts = [_read_part(opened, linear, module, tp_rank, tp_size) for module in linear.checkpoint_names]
        merged = parts[0] if len(parts) == 1 else _merge(opened, linear, parts)
        is_later_row = LINEARS[linear.kind].parallel == "row" and tp_rank > 0
        loaded |= {
            f"{linear}.{suffix}": t for suffix, t in merged.items() if not (is_later_row and suffix in _ON_RANK_0)
        }
    return loaded


def schemes_of(folder: str | Path) -> dict[LinearName, str]:
    """Return FLOAT, W8A8 or W8A8_DYNAMIC of each of the running model's linears. Raises QuantizationError."""
    opened = open_folder(folder)
    return {linear: opened.scheme(linear) for linear in opened.linears()}


def float_tensors(folder: str | Path) -> FloatTensors:
    """Return a source of the tensors outside the quantized linears. Raises QuantizationError."""
    return FloatTensors(open_folder(folder))


def _merge(opened: QuantizedFolder, linear: LinearName, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
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


def _read_part(
    opened: QuantizedFolder, linear: LinearName, module: str, tp_rank: int, tp_size: int
) -> dict[str, Tensor]:
    num_out, num_in = opened.geometry.shape(module.rpartition(".")[2])
    part = _Part(opened, module, num_out)
    part.check_shape("weight", ((num_out, num_in),))
    if LINEARS[linear.kind].parallel == "column":
        channel = _share(num_out, tp_rank, tp_size)
        slices: Slices = (channel, slice(None))
    else:
        channel = slice(None)
        slices = (slice(None), _share(num_in, tp_rank, tp_size))
    read = _static if opened.scheme(linear) == "W8A8" else _dynamic
    tensors = {"weight": part.read("weight", (torch.int8,), () if tp_size == 1 else slices)}
    for suffix, tensor in read(part).items():
        tensors[suffix] = tensor if suffix in _SHARED else tensor[channel].contiguous()
    return tensors


def _share(size: int, rank: int, num_ranks: int) -> slice:
    each = size // num_ranks
    return slice(rank * each, (rank + 1) * each)


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
    module: str
    num_out: int

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
            self.refuse(suffix, "holds negative or infinite scales")
        return scale
