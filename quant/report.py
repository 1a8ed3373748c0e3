"""The error that quantization makes, linear by linear: relative, of weights and, with samples, of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quant import w8a8
from quant.linear import QuantizedLinear


@dataclass(frozen=True, slots=True)
class LinearReport:
    layer: int
    name: str  # in the checkpoint
    shape: tuple[int, int]
    weight_error: float  # |W - dequantized| / |W|, Frobenius
    output_error: float | None  # the same of x W^T + b on the calibration's samples, activations quantized too


@dataclass(frozen=True, slots=True)
class QuantReport:
    scheme: str
    linears: tuple[LinearReport, ...]
    bytes_before: int
    bytes_after: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    layer: int, name: str, weight_NK: Tensor, bias_N: Tensor | None, quantized: Mapping[str, Tensor],
    samples_SK: Tensor | None,
) -> LinearReport:  # fmt: skip
    """Compare a float linear with what `quantize_linear` made of it. With smoothing: both smoothed."""
    weight = weight_NK.float()
    restored = w8a8.dequantize_weight(w8a8.QuantizedWeight(quantized["weight"], quantized["weight_scale"]))
    output_error = None
    if samples_SK is not None:
        exact = torch.nn.functional.linear(samples_SK, weight, None if bias_N is None else bias_N.float())
        output_error = _relative_error(QuantizedLinear(quantized, torch.float32)(samples_SK), exact)
    shape = (weight.shape[0], weight.shape[1])
    return LinearReport(layer, name, shape, _relative_error(restored, weight), output_error)


def _relative_error(found: Tensor, exact: Tensor) -> float:
    norm = torch.linalg.vector_norm(exact).item()
    return torch.linalg.vector_norm(found - exact).item() / norm if norm else 0.0
