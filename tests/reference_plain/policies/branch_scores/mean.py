"""Mean confidence of the remaining masks, as published; with `bottom_share` below 1 of the lowest share of them."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import NO_MASK_LEFT, Score, Scoring
from reference_plain.policies.marks import kept


def score(scoring: Scoring) -> Score:
    confidence_BW, is_masked_BW = scoring.confidence_BW, scoring.is_masked_BW
    num_summed_B = num_masked_B = scoring.num_masked_B
    if scoring.settings.bottom_share >= 1:
        total_B = np.add.reduce(kept(confidence_BW, is_masked_BW), axis=1, dtype=np.float64)
    else:
        lowest_BW = np.sort(np.where(is_masked_BW, confidence_BW, np.inf), axis=1)
        num_summed_B = np.maximum((num_masked_B * scoring.settings.bottom_share).astype(np.int64), 1)
        is_summed_BW = (np.arange(is_masked_BW.shape[1]) < num_summed_B[:, None]) & (num_masked_B > 0)[:, None]
        total_B = np.where(is_summed_BW, lowest_BW, 0.0).sum(axis=1, dtype=np.float64)
    if 0 not in num_masked_B.tolist():
        mean_B: Score = total_B / num_summed_B
        return mean_B
    return np.where(num_masked_B > 0, total_B / np.maximum(num_summed_B, 1), NO_MASK_LEFT)
