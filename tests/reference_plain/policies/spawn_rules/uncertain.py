"""The least confident masks: what would decide most, and is wrong most often."""

from __future__ import annotations

from reference_plain.policies.inputs import Float, Spawning


def rank(spawning: Spawning) -> Float:
    return -spawning.confidence_C
