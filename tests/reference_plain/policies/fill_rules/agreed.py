"""All above `skip_threshold` that enough branches agree on, or else the most confident one. share: of the branches that
predict the winner's token, the winner among them."""

from __future__ import annotations

from reference_plain.policies.inputs import Bool, Filling
from reference_plain.policies.marks import most_confident


def choose(filling: Filling, *, share: float = 1.0) -> Bool:
    token_BM = filling.values_3BM[0]
    share_M = (token_BM == token_BM[filling.winner]).mean(axis=0)
    is_sure_M: Bool = (filling.probability_M > filling.settings.skip_threshold) & (share_M >= share)
    return is_sure_M if is_sure_M.any() else most_confident(filling.confidence_M, 1)
