"""Turns a float model folder into a quantized one, with one decoder layer in memory at a time.

    model folder -> LoRA merge -> smoothing -> quantize_linear -> shards + description + copied config and tokenizer

The folder is written under a temporary name (`partial`): one with its own name is whole.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor

from quant import w8a8
from quant.calibration import ActivationRange, Calibration, smooth_layer
from quant.errors import QuantizationError
from quant.folder import FLOAT, ShardWriter, TensorFolder, read_json, write_description
from quant.folder import Scheme as FileScheme
from quant.layout import is_quantized_folder
from quant.names import Layout, Linear, Part, excluded_linears
from quant.partial import whole_or_nothing
from quant.report import LinearReport, QuantReport, measure
from quant.scheme import quantize_linear

FolderScheme = Literal["w8a8_dynamic", "w8a8"]
MergeLora = Callable[[str, Tensor], Tensor]  # (checkpoint tensor name, tensor) -> the tensor with its adapter merged

logger = logging.getLogger(__name__)

_FILE_SCHEME: dict[str, FileScheme] = {"w8a8_dynamic": "W8A8_DYNAMIC", "w8a8": "W8A8"}
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # config and tokenizer; never code


class _Entry(NamedTuple):
    name: str
    scheme: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Request:
    scheme: FolderScheme
    source: TensorFolder
    layout: Layout
    chosen: frozenset[Linear]
    modules: frozenset[str]  # of the chosen linears
    calibration: Calibration | None
    smooth_alpha: float | None
    lora: MergeLora | None

    def read(self, name: str) -> Tensor:
        """Read the tensor with LoRA merged; in its own dtype if it stays float."""
        tensor = self.source.read(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise QuantizationError(
                f"{self.source.where(name)}: {name}: holds NaN or infinite values; download or train the model again"
            )
        if self.lora is None:
            return tensor
        merged = self.lora(name, tensor)
        return merged if name.rpartition(".")[0] in self.modules else merged.to(tensor.dtype)


def quantize_folder(
    model_folder: str | Path,
    out_folder: str | Path,
    layout: Layout,
    scheme: FolderScheme = "w8a8_dynamic",
    calibration: Calibration | None = None,
    exclude: Sequence[str] = (),
    smooth_alpha: float | None = None,
    lora: MergeLora | None = None,
    max_shard_bytes: int = 2 * 2**30,
) -> QuantReport:
    """Quantize a Hugging Face folder, but for shared experts. Raises QuantizationError.

    `calibration` is needed for "w8a8" and for smoothing, both without experts; `exclude` holds fnmatch patterns on
    run-time or checkpoint names of linears that stay float. An existing `out_folder` must be empty.
    """
    source, out = Path(model_folder).resolve(), Path(out_folder).resolve()
    _check_settings(scheme, calibration, smooth_alpha)
    _check_folders(source, out)
    chosen = chosen_linears(layout, exclude, is_calibrated=calibration is not None)
    modules = frozenset(module for linear in chosen for module in linear.modules)
    request = _Request(scheme, TensorFolder(source), layout, chosen, modules, calibration, smooth_alpha, lora)
    try:
        with whole_or_nothing(out) as partial:
            report = _write(request, partial, max_shard_bytes)
            for path in source.iterdir():
                if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
                    shutil.copyfile(path, partial / path.name)
    except (OSError, SafetensorError) as error:
        raise QuantizationError(f"{out}: could not be written ({error}); free space or write elsewhere") from None
    return report


def chosen_linears(layout: Layout, exclude: Sequence[str], is_calibrated: bool) -> frozenset[Linear]:
    """Return the linears that `quantize_folder` quantizes. Raises QuantizationError."""
    excluded = excluded_linears(layout.linears, exclude)
    chosen = frozenset(linear for linear in layout.linears if linear not in excluded and not linear.stays_float)
    if not chosen:
        raise QuantizationError("exclude leaves no linear to quantize: exclude fewer, or use the float model")
    if is_calibrated and any(linear.num_experts for linear in chosen):
        raise QuantizationError("experts are quantized without a calibration: give none, or exclude '*.experts.*'")
    return chosen


def _write(request: _Request, folder: Path, max_shard_bytes: int) -> QuantReport:
    writer = ShardWriter(folder, max_shard_bytes)
    reports: list[LinearReport] = []
    scheme_of: dict[str, str] = {}
    for entry in _entries(request, reports):
        writer.add(entry.name, entry.tensor)
        scheme_of[entry.name] = entry.scheme
    writer.close()
    write_description(folder, scheme_of, _FILE_SCHEME[request.scheme])
    return QuantReport(request.scheme, tuple(reports), request.source.total_bytes, writer.total_bytes)


def _entries(request: _Request, reports: list[LinearReport]) -> Iterator[_Entry]:
    layout = request.layout
    by_layer: dict[int | None, list[str]] = {}
    for name in request.source.names():
        by_layer.setdefault(layout.layer_of(name), []).append(name)
    extra = [layer for layer in by_layer if layer is not None and layer >= layout.num_layers]
    if extra:
        raise QuantizationError(
            f"{request.source.folder}: layer {min(extra)} is in the files, but config.json has only "
            f"{layout.num_layers} layers: correct num_hidden_layers"
        )
    for name in by_layer.get(None, []):
        yield _Entry(name, FLOAT, request.read(name))
    for layer in range(layout.num_layers):
        tensors = {name: request.read(name) for name in by_layer.get(layer, [])}
        yield from _quantized_layer(request, layer, tensors, reports)
        logger.info("quantized layer %d of %d", layer + 1, layout.num_layers)


def _quantized_layer(
    request: _Request, layer: int, tensors: dict[str, Tensor], reports: list[LinearReport]
) -> Iterator[_Entry]:
    """Quantize a layer's linears, which are taken out of `tensors`; what is left is float."""
    linears = [linear for linear in request.layout.linears if linear.layer == layer and linear in request.chosen]
    for part in (part for linear in linears for part in linear.parts):
        _check_shape(request, part, tensors)
    for linear, own in _input_ranges(request, linears, tensors).items():
        static_input = own.static_input() if own is not None and request.scheme == "w8a8" else None
        for module in linear.modules:
            weight, bias = tensors.pop(f"{module}.weight"), tensors.pop(f"{module}.bias", None)
            quantized = quantize_linear(weight, bias, request.scheme, static_input)
            samples = None if own is None else own.samples
            reports.append(measure(layer, module, weight, bias, quantized, samples))
            yield from _file_entries(module, quantized, bias, request.scheme, weight.dtype)
    for name, tensor in tensors.items():
        yield _Entry(name, FLOAT, tensor)


def _input_ranges(
    request: _Request, linears: Sequence[Linear], tensors: dict[str, Tensor]
) -> Mapping[Linear, ActivationRange | None]:
    """The ranges of the linears' inputs, after smoothing the layer if that was asked for."""
    calibration = request.calibration
    if calibration is None:
        return dict.fromkeys(linears)
    if request.smooth_alpha is None:
        return {linear: calibration.of(str(linear)) for linear in linears}
    return smooth_layer(tensors, linears, calibration, request.layout, request.smooth_alpha)


def _file_entries(
    module: str, quantized: Mapping[str, Tensor], bias: Tensor | None, folder_scheme: FolderScheme, dtype: torch.dtype
) -> Iterator[_Entry]:
    """Shapes and dtypes as msmodelslim writes them: scales fp32 [N, 1], biases fp32 and FLOAT. dtype: the float
    weight's."""
    scheme = _FILE_SCHEME[folder_scheme]
    scale = quantized["weight_scale"][:, None]
    files = {**quantized, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    files.pop("bias", None)
    if "deq_scale" in files and dtype == torch.float16:
        files["deq_scale"] = w8a8.float32_bits(files["deq_scale"])
    for suffix, tensor in files.items():
        yield _Entry(f"{module}.{suffix}", scheme, tensor)
    if bias is not None:
        yield _Entry(f"{module}.bias", FLOAT, bias.float())


def _check_settings(scheme: str, calibration: Calibration | None, smooth_alpha: float | None) -> None:
    if scheme not in get_args(FolderScheme):
        raise QuantizationError(f"scheme {scheme!r} is not known: use w8a8_dynamic or w8a8")
    if smooth_alpha is not None and not 0 <= smooth_alpha <= 1:
        raise QuantizationError(f"smooth_alpha {smooth_alpha} is not in 0..1: 0.5 is a usual choice")
    needs = "scheme 'w8a8'" if scheme == "w8a8" else "smooth_alpha" if smooth_alpha is not None else None
    if needs and calibration is None:
        raise QuantizationError(f"{needs} needs a calibration: give one, or use w8a8_dynamic without smoothing")


def _check_folders(source: Path, out: Path) -> None:
    if not source.is_dir():
        raise QuantizationError(f"{source}: no such folder; give a Hugging Face model folder")
    if is_quantized_folder(source) or read_json(source / "config.json").get("quantization_config"):
        raise QuantizationError(f"{source}: already quantized; give the float model")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise QuantizationError(f"{out}: exists and is not empty; remove it or write elsewhere")


def _check_shape(request: _Request, part: Part, tensors: Mapping[str, Tensor]) -> None:
    key = f"{part.module}.weight"
    if key not in tensors:
        raise QuantizationError(f"{request.source.folder}: {key!r} is in no file; copy the folder again")
    if tuple(tensors[key].shape) != part.shape:
        found = list(tensors[key].shape)
        raise QuantizationError(
            f"{request.source.folder}: {key!r} is {found}, but config.json makes it {list(part.shape)}"
        )
