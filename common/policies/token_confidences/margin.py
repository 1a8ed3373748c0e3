"""The highest probability's lead over the second, p1 - p2."""

from __future__ import annotations

from typing import Any

from common.policies.inputs import Token


def confidence(token: Token) -> Any:
    return token.best - token.second
