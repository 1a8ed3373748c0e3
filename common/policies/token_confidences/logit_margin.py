"""How far the highest logit leads the second, log p1 - log p2: keeps apart what probabilities near 1 do not."""

from __future__ import annotations

from typing import Any

from common.policies.inputs import Token


def confidence(token: Token) -> Any:
    return token.best.log() - token.second.clamp(min=1e-30).log()
