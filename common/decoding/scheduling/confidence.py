"""Branch confidence C(B) and the choice of lookahead positions: pure functions on small arrays, one table each.

Shapes: B branches, W window positions. `rng` is keyed by (seed, request, step), so every rank draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from common.decoding.plan import Bool, Float, Int, Score
from common.decoding.scheduling.rules import Kind

BranchScore = Callable[[Float, Bool, Kind, np.random.Generator], Score]
SpawnRule = Callable[[Float, np.random.Generator], npt.NDArray[np.floating]]

NO_MASK_LEFT = 1.0  # C of a branch without masks


def mean_score(confidence_BW: Float, masked_BW: Bool, kind: Kind, rng: np.random.Generator) -> Score:
    """Mean confidence of the masked positions; with bottom_share < 1 of the lowest share of them, one at least."""
    num_masked_B = np.add.reduce(masked_BW, axis=1, dtype=np.int64)
    if kind.bottom_share >= 1:
        total_B = np.add.reduce(confidence_BW, axis=1, dtype=np.float64, where=masked_BW)
        mean_B: Score = total_B / np.maximum(num_masked_B, 1)
    else:
        lowest_BW = np.sort(np.where(masked_BW, confidence_BW, np.inf), axis=1)
        kept_B = np.maximum((num_masked_B * kind.bottom_share).astype(np.int64), 1)
        is_kept_BW = (np.arange(masked_BW.shape[1]) < kept_B[:, None]) & (num_masked_B > 0)[:, None]
        mean_B = np.where(is_kept_BW, lowest_BW, 0.0).sum(axis=1, dtype=np.float64) / kept_B
    if not num_masked_B.all():
        mean_B[num_masked_B == 0] = NO_MASK_LEFT
    return mean_B


def sliding_window_score(confidence_BW: Float, masked_BW: Bool, kind: Kind, rng: np.random.Generator) -> Score:
    """Mean of the least confident run of `block_size` positions: a branch is as good as its weakest stretch."""
    padding = ((0, 0), (1, 0))
    total_BW = np.pad(np.where(masked_BW, confidence_BW, 0.0).cumsum(axis=1, dtype=np.float64), padding)
    count_BW = np.pad(masked_BW.cumsum(axis=1), padding)
    span = min(kind.span, masked_BW.shape[1])
    num_BW = count_BW[:, span:] - count_BW[:, :-span]
    mean_BW = (total_BW[:, span:] - total_BW[:, :-span]) / np.maximum(num_BW, 1)
    worst_B: Score = np.where(num_BW > 0, mean_BW, np.inf).min(axis=1)
    worst_B[~np.isfinite(worst_B)] = NO_MASK_LEFT
    return worst_B


def random_score(confidence_BW: Float, masked_BW: Bool, kind: Kind, rng: np.random.Generator) -> Score:
    """A control: what lookahead is worth without selection."""
    return rng.random(confidence_BW.shape[:1])


BRANCH_SCORES: dict[str, BranchScore] = {
    "mean": mean_score,
    "sliding_window": sliding_window_score,
    "random": random_score,
}

# Each returns a rank for candidate positions; the highest are filled, one in each lookahead.
SPAWN_RULES: dict[str, SpawnRule] = {
    "confident": lambda confidence_W, rng: confidence_W,
    "uncertain": lambda confidence_W, rng: -confidence_W,
    "random": lambda confidence_W, rng: rng.random(confidence_W.shape[:1]),
}


def spawn_order(rule: str, confidence_C: Float, count: int, rng: np.random.Generator) -> Int:
    """Indices of up to `count` candidates, best rank first; ties go to the earlier position."""
    return np.argsort(-SPAWN_RULES[rule](confidence_C, rng), kind="stable")[:count]


def random_numbers(noise_key: int, num_forwards: int, stream: int) -> np.random.Generator:
    """For the controls among branch scores and spawn rules; a function of request, step and stream alone."""
    return np.random.default_rng((noise_key % 2**63, num_forwards, stream))
