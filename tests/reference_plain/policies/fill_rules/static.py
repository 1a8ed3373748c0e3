"""The `quota` most confident; of equal ones the first."""

from __future__ import annotations

from reference_plain.policies.inputs import Bool, Filling
from reference_plain.policies.marks import most_confident


def choose(filling: Filling) -> Bool:
    return most_confident(filling.confidence_M, filling.quota)
