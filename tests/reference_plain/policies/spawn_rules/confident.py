"""The most confident masks, as published."""

from __future__ import annotations

from reference_plain.policies.inputs import Float, Spawning


def rank(spawning: Spawning) -> Float:
    return spawning.confidence_C
