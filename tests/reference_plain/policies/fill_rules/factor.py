"""The n most probable before the first one, from the second on, whose p is below 1 - factor / (its rank + 1); all where
there is none. Where the very last is the first such one, all too, as Fast-dLLM's code does."""

from __future__ import annotations

import numpy as np

from reference_plain.policies.inputs import Bool, Filling
from reference_plain.policies.marks import marked


def choose(filling: Filling) -> Bool:
    probability_M = filling.probability_M
    order_M = np.argsort(-probability_M, kind="stable")
    rank_M = np.arange(1, len(order_M) + 1)
    is_below_M = (probability_M[order_M] < 1 - filling.settings.factor / (rank_M + 1)) & (rank_M >= 2)
    first = int(is_below_M.argmax()) if is_below_M.any() else len(order_M)
    return marked(order_M[: len(order_M) if first == len(order_M) - 1 else first], len(order_M))
