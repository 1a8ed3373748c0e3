"""Any masks."""

from __future__ import annotations

from reference_plain.policies.inputs import Score, Spawning


def rank(spawning: Spawning) -> Score:
    return spawning.draws.generator().random(len(spawning.column_C))
