"""How sure a prediction is: a number a position, computed on the device.

`default`, `margin` and `neg_entropy` are part of the head's kernels; others take plain operators, on `lopa_cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.policies.inputs import Token


def default(token: Token) -> Any:
    """Return the highest probability, p1."""
    return token.probability


def margin(token: Token) -> Any:
    """Return the highest probability's lead over the second, p1 - p2."""
    return token.best - token.second


def logit_margin(token: Token) -> Any:
    """Return how far the highest logit leads the second, log p1 - log p2: keeps apart what probabilities near 1 do
    not."""
    return token.best.log() - token.second.clamp(min=1e-30).log()


def neg_entropy(token: Token) -> Any:
    """Return the negative entropy, sum p log p."""
    return token.negative_entropy


TOKEN_CONFIDENCES: dict[str, Callable[[Token], Any]] = {
    function.__name__: function for function in (default, margin, logit_margin, neg_entropy)
}
