"""The longest beginning of the most probable masks for which sum(p) - (n - 1) - (1 - p_n) stays above `delta`."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import Bool, Filling
from reference_plain.policies.marks import marked


def choose(filling: Filling, delta: float = 0.25) -> Bool:
    order_M = np.argsort(-filling.probability_M, kind="stable")
    sorted_M = filling.probability_M[order_M].astype(np.float64)
    bound_M = sorted_M.cumsum() - np.arange(len(order_M)) - (1 - sorted_M)
    count = int((bound_M > delta + 1e-12).cumprod().sum())
    return marked(order_M[: max(1, count)], len(order_M))
