"""The highest probability, p1."""

from __future__ import annotations

from typing import Any

from common.policies.inputs import Token


def confidence(token: Token) -> Any:
    return token.probability
