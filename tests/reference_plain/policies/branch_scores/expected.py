"""What a branch fills at once, its own token included, weighted with how likely that token is by now.

The anchor of the same pass knows of the fills that came after the lookahead was spawned, so it judges the token anew;
another token than the anchor's own best counts as wrong. trust: the power of that likelihood; 0 leaves only the check
that the token still is the best, and more trusts lookaheads less.
"""

from __future__ import annotations

import numpy as np

from reference_plain.policies.branch_scores import num_sure
from reference_plain.policies.inputs import Score, Scoring


def score(scoring: Scoring, *, trust: float = 1.0, soon: float = 1.0) -> Score:
    likely_L = scoring.likely_L
    # What is no longer the best stays 0 where trust is 0.
    likely_L = np.power(likely_L, trust, out=np.zeros_like(likely_L), where=likely_L > 0)
    found_B = num_sure.score(scoring, soon=soon)
    found_B[: len(likely_L)] = (found_B[: len(likely_L)] + 1) * likely_L
    return found_B
