"""A control: what lookahead is worth without selection."""

from __future__ import annotations

from reference_plain.policies.inputs import Score, Scoring


def score(scoring: Scoring) -> Score:
    return scoring.draws.generator().random(len(scoring.branches))
