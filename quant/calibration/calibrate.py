"""Ranges of a float model's activations, from running it: what static quantization and smoothing are computed from.

model, runs -> calibrate -> Calibration -> static_input (scheme.quantize_linear), absmax (smooth)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quant import w8a8
from quant.errors import QuantizationError
from quant.names import find_linears
from quant.scheme import StaticInput

_ROWS_A_CALL = 8


@dataclass(frozen=True, slots=True)
class ActivationRange:
    """The range of what went into one linear, per input channel [K], and samples of it."""

    minimum: Tensor  # fp32 [K]
    maximum: Tensor  # fp32 [K]
    samples: Tensor | None = None  # [S, K], for output errors

    @property
    def absmax(self) -> Tensor:
        return torch.maximum(self.minimum.abs(), self.maximum.abs())

    def static_input(self) -> StaticInput:
        """Choose scale and offset: the range, widened to hold 0, takes the 256 codes; the scale is a bfloat16 value."""
        low, high = min(self.minimum.min().item(), 0.0), max(self.maximum.max().item(), 0.0)
        width = max(high - low, 1e-12)  # an input that is always 0 still needs a scale to divide by
        scale = w8a8.round_up_to_bfloat16(torch.tensor([width / 255]))
        return StaticInput(scale, torch.round(-128 - low / scale).clamp(-128, 127))

    def divided(self, scale_K: Tensor) -> ActivationRange:
        """Return the range of x / scale."""
        samples = None if self.samples is None else self.samples / scale_K
        return replace(self, minimum=self.minimum / scale_K, maximum=self.maximum / scale_K, samples=samples)


@dataclass(frozen=True, slots=True)
class Calibration:
    ranges: Mapping[str, ActivationRange]  # by run-time name, e.g. layers.0.qkv_proj

    def of(self, linear: str) -> ActivationRange:
        if linear not in self.ranges:
            raise QuantizationError(f"{linear} was not calibrated: calibrate this model, or exclude the linear")
        return self.ranges[linear]


class Observer:
    """Collects one linear's inputs over any number of calls; the result does not depend on their order or sizes,
    samples aside."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._range: ActivationRange | None = None
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
        free = self._num_samples - sum(len(rows) for rows in self._samples)
        if free > 0:
            stride = max(1, x_TK.shape[0] // _ROWS_A_CALL)
            self._samples.append(x_TK[::stride][: min(free, _ROWS_A_CALL)].cpu())

    def result(self) -> ActivationRange | None:
        if self._range is None:
            return None
        samples = torch.cat(self._samples) if self._samples else None
        return replace(self._range, samples=samples)


def calibrate(model: nn.Module, runs: Iterable[Callable[[], Any]], num_samples: int = 0) -> Calibration:
    """Run every callable (each forwards the model in some way) and observe what enters the model's linears.

    `num_samples` rows of every linear's input are kept for output errors. Raises QuantizationError for a model without
    linears, a linear that no run reached and activations that are not finite.
    """
    observers = {name: Observer(num_samples) for name, _ in find_linears(model)}
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
