"""The tokens that a branch fills, its own included, less what its own token may cost where it is wrong.

The anchor of the same pass judges the lookahead's token anew, as it knows of the fills that came after it was spawned:
p is its probability where the token still is the best one, else 0. A lookahead counts 1 - risk * (1 - p) on top of
what the next step would fill (`num_sure`), the anchor nothing. risk: in tokens; 1: the expected number of right ones.
"""

from __future__ import annotations

from reference_plain.policies.branch_scores import num_sure
from reference_plain.policies.inputs import Score, Scoring


def score(scoring: Scoring, *, risk: float = 2.0, soon: float = 1.0) -> Score:
    likely_L = scoring.likely_L
    found_B = num_sure.score(scoring, soon=soon)
    found_B[: len(likely_L)] += 1 - risk * (1 - likely_L)
    return found_B
