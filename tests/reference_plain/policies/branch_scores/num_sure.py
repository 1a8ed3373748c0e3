"""How many masks the next step would fill at once, those above `skip_threshold`; of equal ones by the mean confidence.

soon: a probability from which a mask counts in part, as it may be filled a step later: in proportion to how far it lies
on the way to the threshold; 1: only those above the threshold count.
"""

from __future__ import annotations

import numpy as np

from reference_plain.policies.branch_scores import mean
from reference_plain.policies.inputs import Score, Scoring


def score(scoring: Scoring, *, soon: float = 1.0) -> Score:
    threshold, probability_BW = scoring.settings.skip_threshold, scoring.probability_BW
    worth_BW = np.where(probability_BW > threshold, 1.0, 0.0)
    if threshold - soon > 1e-6:  # closer ones are one in float32
        worth_BW = np.clip((probability_BW - soon) / (threshold - soon), 0.0, 1.0)
    num_sure_B: Score = worth_BW.sum(axis=1, where=scoring.is_masked_BW, dtype=np.float64)
    return num_sure_B + 1 / (2 - np.minimum(mean.score(scoring), 1))  # the mean is 1 at the most: a tie break below 1
