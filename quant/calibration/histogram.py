"""Streaming percentiles of activations in fixed memory: counts on a logarithmic scale, 1.1% wide bins."""

from __future__ import annotations

import torch
from torch import Tensor

_BINS_AN_OCTAVE = 64
_LOWEST, _HIGHEST = -30, 30  # octaves; smaller magnitudes count as 2^-30, which no 8-bit range tells from zero
_NUM_BINS = (_HIGHEST - _LOWEST) * _BINS_AN_OCTAVE


class LogHistogram:
    """Counts negative and positive values apart; exact to one bin and independent of the order of `add`."""

    def __init__(self) -> None:
        self._negative = torch.zeros(_NUM_BINS, dtype=torch.int64)
        self._positive = torch.zeros(_NUM_BINS, dtype=torch.int64)
        self._num_values = 0

    def add(self, x: Tensor) -> None:
        self._negative += _count(-x[x < 0])
        self._positive += _count(x[x > 0])
        self._num_values += x.numel()

    def bounds(self, percentile: float) -> tuple[float, float]:
        """(low, high) with at most (100 - percentile)% of the values below low, and as many above high."""
        allowed = int(self._num_values * (100 - percentile) / 100)
        return -_upper_bound(self._negative, allowed), _upper_bound(self._positive, allowed)


def _count(magnitude: Tensor) -> Tensor:
    octave = torch.log2(magnitude.flatten()) - _LOWEST
    bins = (octave * _BINS_AN_OCTAVE).floor().clamp(0, _NUM_BINS - 1).to(torch.int64)
    return torch.bincount(bins, minlength=_NUM_BINS).cpu()


def _upper_bound(counts: Tensor, allowed: int) -> float:
    """The upper edge of the highest bin that must be kept when `allowed` values may lie above; 0 if none must."""
    above = counts.flip(0).cumsum(0).flip(0)  # values in this bin and higher ones
    kept = torch.nonzero(above > allowed)
    if len(kept) == 0:
        return 0.0
    return float(2.0 ** ((kept[-1].item() + 1) / _BINS_AN_OCTAVE + _LOWEST))
