"""All whose entropy is below `entropy_threshold`, or else the one of the lowest; confidence is the negative entropy."""

from __future__ import annotations

from reference_plain.policies.inputs import Bool, Filling
from reference_plain.policies.marks import most_confident


def choose(filling: Filling) -> Bool:
    is_sure_M: Bool = -filling.confidence_M < filling.settings.entropy_threshold
    return is_sure_M if is_sure_M.any() else most_confident(filling.confidence_M, 1)
