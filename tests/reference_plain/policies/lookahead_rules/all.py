"""k of them, as published."""

from __future__ import annotations

from reference_plain.policies.inputs import Stepped


def count(stepped: Stepped) -> int:
    num_lookahead: int = stepped.settings.num_lookahead
    return num_lookahead
