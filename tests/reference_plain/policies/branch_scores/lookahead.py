"""A control: the first lookahead wins, unread. With `spawn_rule: random` and one lookahead an order drawn at random."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import Score, Scoring


def score(scoring: Scoring) -> Score:
    return np.array([branch.position is not None for branch in scoring.branches], dtype=np.float64)
