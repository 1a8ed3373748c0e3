"""The most confident masks, and random ones beside them. share: of the confident ones among the lookaheads."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import Score, Spawning


def rank(spawning: Spawning, *, share: float = 0.5) -> Score:
    rank_C: Score = spawning.draws.generator().random(len(spawning.column_C))
    num_confident = round(share * spawning.settings.num_lookahead)
    best = np.argsort(-spawning.confidence_C, kind="stable")[:num_confident]
    rank_C[best] = 1 + np.arange(len(best), 0, -1)
    return rank_C
