"""Mean confidence of the least confident run of `block_size` positions: a branch is as good as its weakest stretch."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import NO_MASK_LEFT, Score, Scoring


def score(scoring: Scoring) -> Score:
    is_masked_BW, padding = scoring.is_masked_BW, ((0, 0), (1, 0))
    total_BW = np.pad(np.where(is_masked_BW, scoring.confidence_BW, 0.0).cumsum(axis=1, dtype=np.float64), padding)
    count_BW = np.pad(is_masked_BW.cumsum(axis=1), padding)
    span = min(scoring.settings.block_size, is_masked_BW.shape[1])
    num_BW = count_BW[:, span:] - count_BW[:, :-span]
    mean_BW = (total_BW[:, span:] - total_BW[:, :-span]) / np.maximum(num_BW, 1)
    worst_B: Score = np.where(num_BW > 0, mean_BW, np.inf).min(axis=1)
    worst_B[~np.isfinite(worst_B)] = NO_MASK_LEFT
    return worst_B
