"""The least confident masks: what would decide most, and is wrong most often."""

from __future__ import annotations

from common.policies.inputs import Float, Spawning


def rank(spawning: Spawning) -> Float:
    return -spawning.confidence_C
