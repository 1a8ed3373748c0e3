"""Which masks of a block a step fills: one at least.

Shapes: M masks of the block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from common.compiled import compiled
from common.policies.rule import MOST, Number, Rules, descending, most_confident

FILL_RULES = Rules("fill")
# Steps in which a whole block is filled, so many positions a step.
STEPS = Number(0, 1, MOST, is_whole=True, shown="one a position")
THRESHOLD, STATIC, DYNAMIC, SEQUENTIAL, ENTROPY, ENTROPY_BOUNDED, FACTOR, AGREED, FRECHET = range(9)


class Masks(NamedTuple):
    """What a step predicts at a block's masks. agreed_M: the share of the branches that predict the winner's token, the
    winner among them. order_M: scratch of whole numbers. quota: how many the rule's `steps` ask for."""

    probability_M: Any
    confidence_M: Any
    agreed_M: Any
    order_M: Any
    quota: int


@FILL_RULES.add("threshold", THRESHOLD)
def threshold(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose all above `skip_threshold`, or else the most confident one."""
    if not _choose_sure(masks, settings, is_chosen_M):
        most_confident(masks.confidence_M, 1, is_chosen_M)


@FILL_RULES.add("static", STATIC, steps=STEPS)
def static(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose the `quota` most confident; of equal ones the first."""
    most_confident(masks.confidence_M, masks.quota, is_chosen_M)


@FILL_RULES.add("dynamic", DYNAMIC, steps=STEPS)
def dynamic(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose all above `skip_threshold` if they are `quota` or more, or else the `quota` most confident."""
    if _choose_sure(masks, settings, is_chosen_M) < masks.quota:
        is_chosen_M[:] = False
        most_confident(masks.confidence_M, masks.quota, is_chosen_M)


@FILL_RULES.add("sequential", SEQUENTIAL, steps=STEPS)
def sequential(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose the first `quota`."""
    is_chosen_M[: masks.quota] = True


@FILL_RULES.add("entropy", ENTROPY, below=Number(0.5, 0, MOST, excludes_least=True))
def entropy(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose all whose entropy (natural logarithm) lies below `below`, or else the one of the lowest (d3LLM, arXiv
    2601.07568); a confidence is the negative entropy."""
    if not _choose_sure(masks, settings, is_chosen_M):
        most_confident(masks.confidence_M, 1, is_chosen_M)


@FILL_RULES.add("entropy_bounded", ENTROPY_BOUNDED, bound=Number(0.35, 0, MOST, excludes_least=True))
def entropy_bounded(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose those of the lowest entropies (natural logarithm) whose sum stays below `bound`; a confidence is the
    negative entropy."""
    order_M, total, count = masks.order_M, np.float64(0), 0
    descending(masks.confidence_M, order_M)
    for rank in range(len(is_chosen_M)):
        total += -masks.confidence_M[order_M[rank]]
        count += total < settings.fill_bound
    for rank in range(max(1, count)):
        is_chosen_M[order_M[rank]] = True


@FILL_RULES.add("factor", FACTOR, f=Number(1.0, 0, MOST, excludes_least=True))
def factor(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose the n most probable before the first one, from the second on, whose p is below 1 - f / (its rank + 1);
    all where there is none. Where the very last is the first such one, all too, as Fast-dLLM's code does."""
    order_M, num_masks = masks.order_M, len(is_chosen_M)
    descending(masks.probability_M, order_M)
    first = num_masks
    for rank in range(1, num_masks):
        if masks.probability_M[order_M[rank]] < 1 - settings.fill_f / (rank + 2):
            first = rank
            break
    if first == num_masks - 1:
        first = num_masks
    for rank in range(first):
        is_chosen_M[order_M[rank]] = True


@FILL_RULES.add("frechet", FRECHET, delta=Number(0.25, 0, 1))
def frechet(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose the most probable masks as long as the Frechet bound of all of them being right, less the last one's
    doubt, stays above `delta` (Fast-dLLM++, arXiv 2606.02955)."""
    order_M, doubts, count = masks.order_M, np.float64(0), 0
    descending(masks.probability_M, order_M)
    for rank in range(len(is_chosen_M)):
        doubt = np.float64(1) - masks.probability_M[order_M[rank]]
        doubts += doubt
        if 1 - doubts - doubt <= settings.fill_delta:
            break
        count += 1
    for rank in range(max(1, count)):
        is_chosen_M[order_M[rank]] = True


@FILL_RULES.add("agreed", AGREED, share=Number(1.0, 0, 1))
def agreed(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Choose all above `skip_threshold` that enough branches agree on, or else the most confident one. share: of the
    branches that predict the winner's token."""
    count = _choose_sure(masks, settings, is_chosen_M)
    for place in range(len(is_chosen_M)):
        if is_chosen_M[place] and masks.agreed_M[place] < settings.fill_share:
            is_chosen_M[place] = False
            count -= 1
    if not count:
        most_confident(masks.confidence_M, 1, is_chosen_M)


@compiled
def _choose_sure(masks: Masks, settings: Any, is_chosen_M: Any) -> int:
    """Choose what passes the rule's threshold; returns how many."""
    count = 0
    for place in range(len(is_chosen_M)):
        is_chosen_M[place] = is_sure(masks.probability_M[place], masks.confidence_M[place], settings)
        count += is_chosen_M[place]
    return count


@compiled
def is_sure(probability: Any, confidence: Any, settings: Any) -> bool:
    """Return whether a mask passes the rule's threshold, so that a block that need not fill any may fill it."""
    if settings.fill_rule == ENTROPY:
        return -confidence < np.float32(settings.fill_below)
    return probability > np.float32(settings.skip_threshold)


@compiled
def choose(masks: Masks, settings: Any, is_chosen_M: Any) -> None:
    """Mark what `settings.fill_rule` chooses. is_chosen_M: False everywhere at first."""
    rule = settings.fill_rule
    if rule == THRESHOLD:
        threshold(masks, settings, is_chosen_M)
    elif rule == STATIC:
        static(masks, settings, is_chosen_M)
    elif rule == DYNAMIC:
        dynamic(masks, settings, is_chosen_M)
    elif rule == SEQUENTIAL:
        sequential(masks, settings, is_chosen_M)
    elif rule == ENTROPY:
        entropy(masks, settings, is_chosen_M)
    elif rule == ENTROPY_BOUNDED:
        entropy_bounded(masks, settings, is_chosen_M)
    elif rule == FACTOR:
        factor(masks, settings, is_chosen_M)
    elif rule == FRECHET:
        frechet(masks, settings, is_chosen_M)
    else:
        agreed(masks, settings, is_chosen_M)
