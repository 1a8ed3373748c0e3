"""How sure a difference between two settings is, if both answered the same problems: the paired bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """What was measured, and between what it lies in 95 of 100 repetitions with other problems of the same kind."""

    value: float
    low: float
    high: float


def paired_interval(
    first: Sequence[float], second: Sequence[float], statistic: Callable[[Values, Values], Values],
    *, num_resamples: int = 10_000, seed: int = 0,
) -> Interval:  # fmt: skip
    """A statistic of two settings. first, second: a number a problem, in the same order.

    statistic: of arrays [..., problems] along their last axis, such as `gain`. Raises ValueError for lists of different
    lengths or without a problem.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"{len(first)} and {len(second)} numbers: give one of each setting for every problem")
    values = np.array((first, second), dtype=np.float64)
    picked = np.random.default_rng(seed).integers(len(first), size=(num_resamples, len(first)))
    resampled = statistic(values[0][picked], values[1][picked])
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(statistic(values[0], values[1])), float(low), float(high))


def in_points(interval: Sequence[float]) -> str:
    """Return value, low and high of shares as a table shows them, in points."""
    value, low, high = (100 * number for number in interval)
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def in_percent(rights: Sequence[float]) -> str:
    """Return the share that is right with its standard error, as a table shows them."""
    share = sum(rights) / len(rights)
    return f"{100 * share:.1f} ± {100 * (share * (1 - share) / len(rights)) ** 0.5:.1f} %"


def difference(first: Values, second: Values) -> Values:
    """Mean of the first minus mean of the second."""
    found: Values = first.mean(axis=-1) - second.mean(axis=-1)
    return found


def gain(first: Values, second: Values) -> Values:
    """Mean of the first over mean of the second, minus 1."""
    found: Values = first.mean(axis=-1) / second.mean(axis=-1) - 1
    return found
