"""All k behind a step that filled little, a share of them behind one that filled much, where the anchor gets on by
itself. plenty: tokens that are much."""

from __future__ import annotations

from reference_plain.policies.inputs import Stepped


def count(stepped: Stepped, *, plenty: float = 4, share: float = 0.5) -> int:
    most: int = stepped.settings.num_lookahead
    return most if stepped.num_filled < plenty else round(share * most)
