"""The negative entropy, sum p log p."""

from __future__ import annotations

from typing import Any

from common.policies.inputs import Token


def confidence(token: Token) -> Any:
    return token.negative_entropy
