"""Policies: small pure functions that settings choose by name, those of a kind in one module.

Another package adds one by an entry point of the group `lopa.<kind>` (docs/policies.md). What each is
given and returns: `inputs.py`.
"""

from common.policies import branch_scores, fill_rules, lookahead_rules, rule, settings, spawn_rules
from common.policies.inputs import Draws, Filling, Scoring, Spawning, Stepped, Token, Tried
from common.policies.registry import calls, check, number_of, origins, parsed, policy, rule_of, shipped

__all__ = [
    "Draws",
    "Filling",
    "Scoring",
    "Spawning",
    "Stepped",
    "Token",
    "Tried",
    "branch_scores",
    "calls",
    "check",
    "fill_rules",
    "lookahead_rules",
    "number_of",
    "origins",
    "parsed",
    "policy",
    "rule",
    "rule_of",
    "settings",
    "shipped",
    "spawn_rules",
]
