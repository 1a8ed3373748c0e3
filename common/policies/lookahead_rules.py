"""How many of the `num_lookahead` lookaheads the next step tries."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.compiled import compiled
from common.policies.rule import MOST, Number, Rules

LOOKAHEAD_RULES = Rules("lookahead")
ALL, STALLED, DISPUTED = range(3)


@LOOKAHEAD_RULES.add("all", ALL)
def every(num_filled: int, num_masked: int, variance: float, settings: Any) -> int:
    """Try k of them, as published."""
    return int(settings.num_lookahead)


@LOOKAHEAD_RULES.add("stalled", STALLED, plenty=4, share=0.5)
def stalled(num_filled: int, num_masked: int, variance: float, settings: Any) -> int:
    """Try all k after a step that filled little, a share of them after one that filled much, where the anchor gets on
    by itself. plenty: tokens that are much."""
    most = int(settings.num_lookahead)
    if num_filled < settings.lookahead_plenty:
        return most
    return int(np.rint(settings.lookahead_share * most))


@LOOKAHEAD_RULES.add("disputed", DISPUTED, variance=Number(0.02, 0, MOST))
def disputed(num_filled: int, num_masked: int, variance: float, settings: Any) -> int:
    """Try none after a step whose lookaheads' scores agree, that is, vary by less than `variance`; else all k. AdaLook
    (arXiv 2607.15655) stops to look further ahead so."""
    return 0 if variance < settings.lookahead_variance else int(settings.num_lookahead)


@compiled
def count(num_filled: int, num_masked: int, variance: float, settings: Any) -> int:
    """Return what `settings.lookahead_rule` says, 0 to `num_lookahead`. num_filled: tokens that the step filled by its
    fill rule. num_masked: masks left in active blocks. variance: of the scores of the step's lookaheads."""
    if settings.lookahead_rule == STALLED:
        found = stalled(num_filled, num_masked, variance, settings)
    elif settings.lookahead_rule == DISPUTED:
        found = disputed(num_filled, num_masked, variance, settings)
    else:
        found = every(num_filled, num_masked, variance, settings)
    return min(max(found, 0), int(settings.num_lookahead))
