"""Ranges of a float model's activations, from running it: what static quantization and smoothing are computed from.

model, runs -> calibrate -> Calibration -> static_input (scheme.quantize_linear), absmax (smooth)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quant import w8a8
from quant.calibration.histogram import LogHistogram
from quant.errors import QuantizationError
from quant.names import find_linears
from quant.scheme import StaticInput

_FORMAT = "lopa-calibration-1"
_ROWS_A_CALL = 8


@dataclass(frozen=True, slots=True)
class ActivationRange:
    """The range of what went into one linear, per input channel [K], and samples of it."""

    minimum: Tensor  # fp32 [K]
    maximum: Tensor  # fp32 [K]
    clip: tuple[float, float] | None = None  # tighter bounds for the whole tensor, from a percentile
    samples: Tensor | None = None  # [S, K], for output errors

    @property
    def absmax(self) -> Tensor:
        return torch.maximum(self.minimum.abs(), self.maximum.abs())

    def static_input(self) -> StaticInput:
        """Choose scale and offset: the range, widened to hold 0, takes the 256 codes; the scale is a bfloat16 value."""
        low, high = self.clip or (self.minimum.min().item(), self.maximum.max().item())
        low, high = min(low, 0.0), max(high, 0.0)
        width = max(high - low, 1e-12)  # an input that is always 0 still needs a scale to divide by
        scale = w8a8.round_up_to_bfloat16(torch.tensor([width / 255]))
        return StaticInput(scale, torch.round(-128 - low / scale).clamp(-128, 127))

    def divided(self, scale_K: Tensor) -> ActivationRange:
        """The range of x / scale. Raises QuantizationError for percentiles: they cannot be carried over."""
        if self.clip is not None:
            raise QuantizationError("smoothing needs a min/max calibration: calibrate without a percentile")
        samples = None if self.samples is None else self.samples / scale_K
        return replace(self, minimum=self.minimum / scale_K, maximum=self.maximum / scale_K, samples=samples)


@dataclass(frozen=True, slots=True)
class Calibration:
    ranges: Mapping[str, ActivationRange]  # by run-time name, e.g. layers.0.qkv_proj

    def of(self, linear: str) -> ActivationRange:
        if linear not in self.ranges:
            raise QuantizationError(f"{linear} was not calibrated: calibrate this model, or exclude the linear")
        return self.ranges[linear]

    def save(self, path: str | Path) -> None:
        tensors: dict[str, Tensor] = {}
        for name, own in self.ranges.items():
            tensors |= {f"{name}.minimum": own.minimum, f"{name}.maximum": own.maximum}
            if own.clip is not None:
                tensors[f"{name}.clip"] = torch.tensor(own.clip)
            if own.samples is not None:
                tensors[f"{name}.samples"] = own.samples
        save_file(tensors, path, metadata={"format": _FORMAT})


def load_calibration(path: str | Path) -> Calibration:
    """Load a calibration. Raises QuantizationError for a file that `Calibration.save` did not write."""
    try:
        with safe_open(path, framework="pt") as file:
            is_ours = (file.metadata() or {}).get("format") == _FORMAT
            tensors = {name: file.get_tensor(name) for name in file.keys()} if is_ours else {}  # noqa: SIM118
    except (SafetensorError, OSError, MemoryError) as error:
        raise QuantizationError(f"{path}: not a readable calibration file ({error}); calibrate again") from None
    if not tensors:
        raise QuantizationError(f"{path}: not a calibration file: write one with a calibration run")
    ranges: dict[str, ActivationRange] = {}
    for key in tensors:
        name, _, suffix = key.rpartition(".")
        if suffix == "minimum":
            clip = tensors.get(f"{name}.clip")
            bounds = None if clip is None else (clip[0].item(), clip[1].item())
            samples = tensors.get(f"{name}.samples")
            ranges[name] = ActivationRange(tensors[key], tensors[f"{name}.maximum"], bounds, samples)
    return Calibration(ranges)


class Observer:
    """Collects one linear's inputs over any number of calls; the result does not depend on their order or sizes,
    samples aside."""

    def __init__(self, percentile: float | None, num_samples: int) -> None:
        self._percentile = percentile
        self._num_samples = num_samples
        self._range: ActivationRange | None = None
        self._histogram = None if percentile is None else LogHistogram()
        self._samples: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        """Take inputs x [..., K], which have to be finite."""
        x_TK = x.detach().reshape(-1, x.shape[-1]).float()
        low, high = x_TK.amin(dim=0).cpu(), x_TK.amax(dim=0).cpu()
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise QuantizationError("an activation is not finite: calibrate in bfloat16 or float32")
        if self._range is not None:
            low, high = torch.minimum(low, self._range.minimum), torch.maximum(high, self._range.maximum)
        self._range = ActivationRange(low, high)
        if self._histogram is not None:
            self._histogram.add(x_TK)
        free = self._num_samples - sum(len(rows) for rows in self._samples)
        if free > 0:
            stride = max(1, x_TK.shape[0] // _ROWS_A_CALL)
            self._samples.append(x_TK[::stride][: min(free, _ROWS_A_CALL)].cpu())

    def result(self) -> ActivationRange | None:
        if self._range is None:
            return None
        clip = None
        if self._histogram is not None and self._percentile is not None:
            lowest, highest = self._histogram.bounds(self._percentile)
            full = self._range.minimum.min().item(), self._range.maximum.max().item()
            clip = max(lowest, full[0]), min(highest, full[1])
        samples = torch.cat(self._samples) if self._samples else None
        return replace(self._range, clip=clip, samples=samples)


def calibrate(
    model: nn.Module, runs: Iterable[Callable[[], Any]], percentile: float | None = None, num_samples: int = 0
) -> Calibration:
    """Run every callable (each forwards the model in some way) and observe what enters the model's linears.

    `percentile` p clips static ranges so that (100 - p)% of the values lie beyond each bound; None is min/max.
    `num_samples` rows of every linear's input are kept for output errors. Raises QuantizationError for a model without
    linears, a linear that no run reached and activations that are not finite.
    """
    if percentile is not None and not 50 < percentile <= 100:
        raise QuantizationError(f"percentile {percentile} is not in 50..100: 99.99 is a usual choice")
    observers = {name: Observer(percentile, num_samples) for name, _ in find_linears(model)}
    if not observers:
        raise QuantizationError("the model has no float qkv_proj, o_proj, gate_up_proj or down_proj to calibrate")
    handles = [module.register_forward_pre_hook(_hook(name, observers[name])) for name, module in find_linears(model)]
    try:
        with torch.no_grad():
            for run in runs:
                run()
    finally:
        for handle in handles:
            handle.remove()
    ranges = {name: own for name, observer in observers.items() if (own := observer.result()) is not None}
    missed = sorted(observers.keys() - ranges.keys())
    if missed:
        raise QuantizationError(f"no calibration run reached {missed[0]}: give runs that forward the whole model")
    return Calibration(ranges)


def _hook(name: str, observer: Observer) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def observe(_: nn.Module, args: tuple[Any, ...]) -> None:
        try:
            observer.update(args[0])
        except QuantizationError as error:
            raise QuantizationError(f"{name}: {error}") from None

    return observe
