"""Masks whose token is about as probable as this: likely enough to be right, and open enough to tell something."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import Float, Spawning


def rank(spawning: Spawning, *, probability: float = 0.6) -> Float:
    distance_C: Float = np.abs(spawning.probability_C - np.float32(probability))
    return -distance_C
