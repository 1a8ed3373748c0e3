"""What may be swapped by name in YAML without touching a scheduler: small pure functions, each in a file of its own.

The folder says what a function decides, the file's name is its name in YAML. A package of somebody else's adds one by
an entry point of the group `lopa.<folder>` (docs/policies.md). What each is given and returns: `inputs.py`.
"""

from __future__ import annotations

from common.policies.inputs import NO_MASK_LEFT, Draws, Filling, Scoring, Spawning, Stepped, Token, Tried
from common.policies.marks import kept
from common.policies.registry import names, origins, policy, shipped

__all__ = [
    "NO_MASK_LEFT",
    "Draws",
    "Filling",
    "Scoring",
    "Spawning",
    "Stepped",
    "Token",
    "Tried",
    "kept",
    "names",
    "origins",
    "policy",
    "shipped",
]
