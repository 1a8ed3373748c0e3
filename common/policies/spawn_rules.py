"""Which masks of the next anchor the lookaheads fill: those of the highest rank, of equal ones the earliest.

Shapes: C masks that may be tried, of all active blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from common.compiled import compiled
from common.policies.rule import MOST, Number, Rules, descending

# blocks: how many active blocks that hold masks lookaheads may go into, the first ones; 0: all of them. entropy: in
# nats, as `num_guarded` takes it. tokens: how many of its most probable ones each mask is tried with, if they are
# `ratio` times as probable as the first one or more.
MOST_TOKENS = 16
SPAWN_RULES = Rules(
    "spawn", blocks=Number(0, 1, MOST, is_whole=True, shown="all"), entropy=Number(MOST, 0, MOST, shown="no bound"),
    tokens=Number(1, 1, MOST_TOKENS, is_whole=True), ratio=Number(0.1, 0, 1),
)  # fmt: skip
CONFIDENT, UNCERTAIN, NEAR, MIXED, SPREAD, RANDOM, NESTED, PIVOT = range(8)
DRAWN = (MIXED, RANDOM)  # rules that look at random numbers


class Open(NamedTuple):
    """Masks that may be tried. mass_C, spread_C: of their `tokens` most probable ones, the sum of the probabilities and
    the entropy in nats, where the rule looks at them. draw_C: likewise random numbers. order_C: scratch of integers."""

    probability_C: Any
    confidence_C: Any
    mass_C: Any
    spread_C: Any
    draw_C: Any
    order_C: Any


@compiled
def num_guarded(confidence_M: Any, bound: float) -> int:
    """Return how many of the masks, the first ones, may be tried: those for which the entropies of the masks to the
    left sum to at most `bound` nats. RPD (Reliable Parallel Decoding in Masked Diffusion Language Models, 2026) guards
    fills so. confidence_M: negative entropies, from left to right."""
    total = np.float64(0)
    for place in range(len(confidence_M)):
        if total > bound:
            return place
        total -= confidence_M[place]
    return len(confidence_M)


@SPAWN_RULES.add("confident", CONFIDENT)
def confident(masks: Open, settings: Any, rank_C: Any) -> None:
    """Rank the most confident masks first, as published (LoPA, arXiv 2512.16229)."""
    for place in range(len(rank_C)):
        rank_C[place] = masks.confidence_C[place]


@SPAWN_RULES.add("nested", NESTED)
def nested(masks: Open, settings: Any, rank_C: Any) -> None:
    """Rank the most confident masks first. The j-th lookahead fills the first j of them: drafts of the coming j steps
    (FreeDave, arXiv 2510.00294; PSD, arXiv 2605.15609)."""
    confident(masks, settings, rank_C)


@SPAWN_RULES.add("pivot", PIVOT, tokens=Number(4, 2, MOST_TOKENS, is_whole=True), mass=Number(0.8, 0, 1))
def pivot(masks: Open, settings: Any, rank_C: Any) -> None:
    """Rank the mask first that is the most open between a few tokens: of those whose `tokens` most probable ones have
    `mass` or more together, the one where these have the highest entropy. The lookaheads try this mask alone, each with
    another token; where there is none, nothing is tried (RPS, arXiv 2608.11742)."""
    for place in range(len(rank_C)):
        rank_C[place] = masks.spread_C[place] if masks.mass_C[place] >= settings.spawn_mass else -1.0


@SPAWN_RULES.add("uncertain", UNCERTAIN)
def uncertain(masks: Open, settings: Any, rank_C: Any) -> None:
    """Rank the least confident masks first: what would decide most, and is wrong most often."""
    for place in range(len(rank_C)):
        rank_C[place] = -masks.confidence_C[place]


@SPAWN_RULES.add("near", NEAR, probability=Number(0.6, 0, 1))
def near(masks: Open, settings: Any, rank_C: Any) -> None:
    """Rank masks first whose token is about as probable as this: likely enough to be right, and open enough to tell
    something."""
    for place in range(len(rank_C)):
        rank_C[place] = -abs(masks.probability_C[place] - np.float32(settings.spawn_probability))


@SPAWN_RULES.add("mixed", MIXED, share=Number(0.5, 0, 1))
def mixed(masks: Open, settings: Any, rank_C: Any) -> None:
    """Rank the most confident masks first, and random ones after them. share: of the confident ones among the
    lookaheads."""
    for place in range(len(rank_C)):
        rank_C[place] = masks.draw_C[place]
    descending(masks.confidence_C, masks.order_C)
    count = min(int(np.rint(settings.spawn_share * settings.num_lookahead)), len(rank_C))
    for place in range(count):
        rank_C[masks.order_C[place]] = 1 + count - place


@SPAWN_RULES.add("spread", SPREAD)
def spread(masks: Open, settings: Any, rank_C: Any) -> None:
    """Rank masks first that lie evenly over the masks' confidences, from the most confident to the least."""
    rank_C[:] = 0.0
    descending(masks.confidence_C, masks.order_C)
    order_C, num_masks = masks.order_C, len(rank_C)
    count = min(settings.num_lookahead, num_masks)
    distance = (num_masks - 1) / (count - 1) if count > 1 else 0.0
    for place in range(count):
        is_last = place == count - 1 and count > 1
        rank_C[order_C[num_masks - 1 if is_last else int(np.rint(place * distance))]] = count - place


@SPAWN_RULES.add("random", RANDOM)
def random(masks: Open, settings: Any, rank_C: Any) -> None:
    """Rank masks at random: a control."""
    for place in range(len(rank_C)):
        rank_C[place] = masks.draw_C[place]


@compiled
def rank(masks: Open, settings: Any, rank_C: Any) -> None:
    """Write the rank that `settings.spawn_rule` gives each mask."""
    rule = settings.spawn_rule
    if rule in (CONFIDENT, NESTED):
        confident(masks, settings, rank_C)
    elif rule == PIVOT:
        pivot(masks, settings, rank_C)
    elif rule == UNCERTAIN:
        uncertain(masks, settings, rank_C)
    elif rule == NEAR:
        near(masks, settings, rank_C)
    elif rule == MIXED:
        mixed(masks, settings, rank_C)
    elif rule == SPREAD:
        spread(masks, settings, rank_C)
    else:
        random(masks, settings, rank_C)
