"""Evenly over the masks' confidences, from the most confident to the least."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import Score, Spawning


def rank(spawning: Spawning) -> Score:
    num_masks = len(spawning.column_C)
    chosen = np.linspace(0, num_masks - 1, min(spawning.settings.num_lookahead, num_masks)).round().astype(np.int64)
    order_C = np.argsort(-spawning.confidence_C, kind="stable")
    rank_C = np.zeros(num_masks)
    rank_C[order_C[chosen]] = np.arange(len(chosen), 0, -1)
    return rank_C
