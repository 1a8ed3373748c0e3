"""All above `skip_threshold` if they are `quota` or more, or else the `quota` most confident."""

from __future__ import annotations

from reference_plain.policies.inputs import Bool, Filling
from reference_plain.policies.marks import most_confident


def choose(filling: Filling) -> Bool:
    is_sure_M: Bool = filling.probability_M > filling.settings.skip_threshold
    return is_sure_M if is_sure_M.sum() >= filling.quota else most_confident(filling.confidence_M, filling.quota)
