"""Those of the lowest entropies whose sum stays below `entropy_bound`; confidence is the negative entropy."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import Bool, Filling
from reference_plain.policies.marks import marked


def choose(filling: Filling) -> Bool:
    order_M = np.argsort(-filling.confidence_M, kind="stable")
    total_M = np.cumsum(-filling.confidence_M[order_M], dtype=np.float64)
    return marked(order_M[: max(1, int((total_M < filling.settings.entropy_bound).sum()))], len(order_M))
