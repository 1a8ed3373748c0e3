"""Branch confidence C(B): of a pass's branches the one of the highest score is kept; of equal ones the first, so that
the anchor, which comes last, loses ties.

Shapes: M masks that a branch has left, W positions of its window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from common.compiled import compiled
from common.policies.rule import Number, Rules, sort

NO_MASK_LEFT = 1.0  # C of a branch without masks
# created: the weight, in a branch's score, of the confidence that its lookahead token had when it was spawned.
BRANCH_SCORES = Rules("score", created=Number(0.0, 0, 1))
MEAN, NUM_SURE, EXPECTED, HEDGED, SLIDING_WINDOW, RANDOM, ANCHOR, LOOKAHEAD, AGREEMENT, EXACT, SUBSET, RIPPLE = range(
    12
)


class Left(NamedTuple):
    """A branch's masks: columns of the window, ascending; the probability and confidence that the pass gives each,
    which a score may reorder. sum_W: float64 scratch of the window's length and one more."""

    column_M: Any
    probability_M: Any
    confidence_M: Any
    sum_W: Any


class Tried(NamedTuple):
    """A branch. num_fills: its own tokens, 0 for the anchor. likely: the probability of these as the anchor of the same
    pass judges them anew, knowing of the fills that came after the branch was spawned; 0 where another token is the
    best by now. is_agreed: each of them is what the branch without it and its later ones predicts. draw: a random
    number for it. width: positions of the widest window."""

    num_fills: int
    likely: float
    is_agreed: bool
    draw: float
    width: int


@BRANCH_SCORES.add("mean", MEAN, bottom_share=Number(1.0, 0, 1, excludes_least=True))
def mean(left: Any, tried: Any, settings: Any) -> float:
    """Return the mean confidence of the remaining masks, as published (LoPA, arXiv 2512.16229).

    bottom_share: of the masks that count, the least confident ones.
    """
    return _mean_of_lowest(left, settings.score_bottom_share)


@compiled
def _mean_of_lowest(left: Any, share: float) -> float:
    count = len(left.confidence_M)
    if not count:
        return NO_MASK_LEFT
    total = np.float64(0)
    if share >= 1:
        for confidence in left.confidence_M:
            total += confidence
        return total / count
    count = max(int(count * share), 1)
    sort(left.confidence_M)
    for place in range(count):
        total += left.confidence_M[place]
    return total / count


@BRANCH_SCORES.add("num_sure", NUM_SURE, soon=Number(1.0, 0, 1))
def num_sure(left: Any, tried: Any, settings: Any) -> float:
    """Return how many masks the next step would fill at once, those above `skip_threshold`; of equal counts the higher
    mean confidence decides.

    soon: a probability from which a mask counts in part, as it may be filled a step later: in proportion to how far it
    lies on the way to the threshold; 1: only those above the threshold count.
    """
    threshold, total = np.float32(settings.skip_threshold), np.float64(0)
    soon, span = np.float32(settings.score_soon), np.float32(settings.skip_threshold - settings.score_soon)
    for probability in left.probability_M:
        if settings.skip_threshold - settings.score_soon > 1e-6:  # closer ones are one in float32
            total += min(max(np.float32(probability - soon) / span, np.float32(0)), np.float32(1))
        elif probability > threshold:
            total += 1.0
    return total + 1 / (2 - min(_mean_of_lowest(left, 1.0), 1.0))  # the mean is 1 at the most: a tie break below 1


@BRANCH_SCORES.add("expected", EXPECTED, trust=Number(1.0, 0), soon=Number(1.0, 0, 1))
def expected(left: Any, tried: Any, settings: Any) -> float:
    """Return what a branch fills at once, its own tokens included, weighted with how likely those are by now.

    trust: the power of that likelihood; 0 leaves only the check that the tokens still are the best, and more trusts
    lookaheads less.
    """
    found = num_sure(left, tried, settings)
    if not tried.num_fills:
        return found
    likely = tried.likely**settings.score_trust if tried.likely > 0 else 0.0
    return (found + tried.num_fills) * likely


@BRANCH_SCORES.add("hedged", HEDGED, risk=2.0, soon=Number(1.0, 0, 1))
def hedged(left: Any, tried: Any, settings: Any) -> float:
    """Return the tokens that a branch fills, its own included, less what its own may cost where they are wrong.

    risk: in tokens; 1: the expected number of right ones.
    """
    found = num_sure(left, tried, settings)
    return found + (tried.num_fills - settings.score_risk * (1 - tried.likely)) if tried.num_fills else found


@BRANCH_SCORES.add("ripple", RIPPLE, trust=Number(0.3, 0))
def ripple(left: Any, tried: Any, settings: Any) -> float:
    """Return minus the mean entropy of the masks that no lookahead fills, plus `trust` times the logarithm of how
    likely the branch's own tokens are by now (RPS, arXiv 2608.11742); a confidence is the negative entropy."""
    total = np.float64(0)
    for confidence in left.confidence_M:
        total += confidence
    mean_confidence = total / max(len(left.confidence_M), 1)
    return mean_confidence + settings.score_trust * np.log(max(tried.likely, 1e-30))


@BRANCH_SCORES.add("sliding_window", SLIDING_WINDOW)
def sliding_window(left: Any, tried: Any, settings: Any) -> float:
    """Return the mean confidence of the least confident run of `block_size` positions: a branch is as good as its
    weakest stretch."""
    span, column_M, sum_W = min(settings.block_size, tried.width), left.column_M, left.sum_W
    num_masks, place, total = len(column_M), 0, np.float64(0)
    for column in range(tried.width + 1):  # sum_W[c]: of the masks before column c
        sum_W[column] = total
        if place < num_masks and column_M[place] == column:
            total += left.confidence_M[place]
            place += 1
    worst, first, end_place = np.inf, 0, 0
    for end in range(span, tried.width + 1):
        while end_place < num_masks and column_M[end_place] < end:
            end_place += 1
        while first < num_masks and column_M[first] < end - span:
            first += 1
        if end_place > first:
            worst = min(worst, (sum_W[end] - sum_W[end - span]) / (end_place - first))
    return worst if np.isfinite(worst) else NO_MASK_LEFT


@BRANCH_SCORES.add("random", RANDOM)
def random(left: Any, tried: Any, settings: Any) -> float:
    """Return a random number: a control, what lookahead is worth without selection."""
    return float(tried.draw)


@BRANCH_SCORES.add("anchor", ANCHOR)
def anchor(left: Any, tried: Any, settings: Any) -> float:
    """Let the anchor win: a control, lookaheads are computed for nothing."""
    return 0.0 if tried.num_fills else 1.0


@BRANCH_SCORES.add("lookahead", LOOKAHEAD)
def lookahead(left: Any, tried: Any, settings: Any) -> float:
    """Let the first lookahead win, unread: a control. With `spawn_rule: random` and k = 1 an order at random."""
    return 1.0 if tried.num_fills else 0.0


@BRANCH_SCORES.add("agreement", AGREEMENT)
def agreement(left: Any, tried: Any, settings: Any) -> float:
    """Let the branch of most tokens win whose every token the branch before it predicts (PSD, arXiv 2605.15609)."""
    return float(tried.num_fills) if tried.is_agreed else -1.0


@BRANCH_SCORES.add("exact", EXACT)
def exact(left: Any, tried: Any, settings: Any) -> float:
    """Let the branch win that decoding without lookaheads would come to next, and from there the next one: the same
    tokens in fewer passes (FreeDave, arXiv 2510.00294). The anchor wins before `scheduling.drafts` has looked."""
    return anchor(left, tried, settings)


@BRANCH_SCORES.add("subset", SUBSET)
def subset(left: Any, tried: Any, settings: Any) -> float:
    """Let the branch of most tokens win all of which the anchor fills too, and from there the next one (FreeDave, with
    its rule for fills above a threshold). The anchor wins before `scheduling.drafts` has looked."""
    return anchor(left, tried, settings)


@compiled
def score_of(left: Any, tried: Any, settings: Any) -> float:
    """Return C(B) of a branch by `settings.branch_score`."""
    rule = settings.branch_score
    if rule == MEAN:
        return mean(left, tried, settings)
    if rule == NUM_SURE:
        return num_sure(left, tried, settings)
    if rule == EXPECTED:
        return expected(left, tried, settings)
    if rule == HEDGED:
        return hedged(left, tried, settings)
    if rule == SLIDING_WINDOW:
        return sliding_window(left, tried, settings)
    if rule == RANDOM:
        return random(left, tried, settings)
    if rule == RIPPLE:
        return ripple(left, tried, settings)
    if rule == AGREEMENT:
        return agreement(left, tried, settings)
    if rule in (ANCHOR, EXACT, SUBSET):
        return anchor(left, tried, settings)
    return lookahead(left, tried, settings)
