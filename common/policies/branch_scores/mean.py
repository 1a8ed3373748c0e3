"""Mean confidence of the remaining masks, as published; with `bottom_share` below 1 of the lowest share of them."""

from __future__ import annotations

import numpy as np

from common.policies.inputs import NO_MASK_LEFT, Score, Scoring


def score(scoring: Scoring) -> Score:
    confidence_BW, is_masked_BW = scoring.confidence_BW, scoring.is_masked_BW
    num_masked_B = np.add.reduce(is_masked_BW, axis=1, dtype=np.int64)
    if scoring.settings.bottom_share >= 1:
        total_B = np.add.reduce(confidence_BW, axis=1, dtype=np.float64, where=is_masked_BW)
        mean_B: Score = total_B / np.maximum(num_masked_B, 1)
    else:
        lowest_BW = np.sort(np.where(is_masked_BW, confidence_BW, np.inf), axis=1)
        kept_B = np.maximum((num_masked_B * scoring.settings.bottom_share).astype(np.int64), 1)
        is_kept_BW = (np.arange(is_masked_BW.shape[1]) < kept_B[:, None]) & (num_masked_B > 0)[:, None]
        mean_B = np.where(is_kept_BW, lowest_BW, 0.0).sum(axis=1, dtype=np.float64) / kept_B
    if np.count_nonzero(num_masked_B) < len(num_masked_B):
        mean_B[num_masked_B == 0] = NO_MASK_LEFT
    return mean_B
