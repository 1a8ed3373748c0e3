"""The shipped policies as numpy functions, by kind and name: what the compiled ones are held against."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from common.policies import Filling, Scoring, Spawning, Stepped
from common.policies.branch_scores import NO_MASK_LEFT
from common.policies.inputs import Bool, Float, Int, Score
from common.policies.registry import parsed

_RULES: dict[str, dict[str, Callable[..., Any]]] = {}


@cache
def policy(kind: str, setting: str) -> Callable[..., Any]:
    name, numbers = parsed(setting)
    return partial(_RULES[kind][name], **numbers)


def _rule(kind: str, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def entered(function: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.setdefault(kind, {})[name or function.__name__] = function
        return function

    return entered


@_rule("branch_scores")
def mean(scoring: Scoring) -> Score:
    """Mean confidence of the remaining masks, as published; with `bottom_share` below 1 of the lowest share of them."""
    is_masked_BW = scoring.is_masked_BW
    num_masked_B = is_masked_BW.sum(axis=1)
    num_summed_B = num_masked_B
    if scoring.settings.bottom_share < 1:
        num_summed_B = np.maximum((num_masked_B * scoring.settings.bottom_share).astype(np.int64), 1)
    lowest_BW = np.sort(np.where(is_masked_BW, scoring.confidence_BW, np.inf), axis=1)
    is_summed_BW = np.arange(is_masked_BW.shape[1]) < np.minimum(num_summed_B, num_masked_B)[:, None]
    total_B = np.where(is_summed_BW, lowest_BW, 0.0).sum(axis=1, dtype=np.float64)
    return np.where(num_masked_B > 0, total_B / np.maximum(num_summed_B, 1), NO_MASK_LEFT)


@_rule("branch_scores")
def num_sure(scoring: Scoring, *, soon: float = 1.0) -> Score:
    """How many masks the next step would fill at once, those above `skip_threshold`; of equal ones by the mean
    confidence. soon: a probability from which a mask counts in part."""
    threshold, probability_BW = scoring.settings.skip_threshold, scoring.probability_BW
    worth_BW = np.where(probability_BW > threshold, 1.0, 0.0)
    if threshold - soon > 1e-6:  # closer ones are one in float32
        worth_BW = np.clip((probability_BW - soon) / (threshold - soon), 0.0, 1.0)
    num_sure_B: Score = worth_BW.sum(axis=1, where=scoring.is_masked_BW, dtype=np.float64)
    return num_sure_B + 1 / (2 - np.minimum(mean(scoring), 1))  # the mean is 1 at the most: a tie break below 1


@_rule("branch_scores")
def expected(scoring: Scoring, *, trust: float = 1.0, soon: float = 1.0) -> Score:
    """What a branch fills at once, its own token included, weighted with how likely that token is by now."""
    likely_L = scoring.likely_B[:-1]
    # What is no longer the best stays 0 where trust is 0.
    likely_L = np.power(likely_L, trust, out=np.zeros_like(likely_L), where=likely_L > 0)
    found_B = num_sure(scoring, soon=soon)
    found_B[:-1] = (found_B[:-1] + 1) * likely_L
    return found_B


@_rule("branch_scores")
def hedged(scoring: Scoring, *, risk: float = 2.0, soon: float = 1.0) -> Score:
    """The tokens that a branch fills, its own included, less what its own token may cost where it is wrong."""
    found_B = num_sure(scoring, soon=soon)
    found_B[:-1] += 1 - risk * (1 - scoring.likely_B[:-1])
    return found_B


@_rule("branch_scores")
def sliding_window(scoring: Scoring) -> Score:
    """Mean confidence of the least confident run of `block_size` positions."""
    is_masked_BW, padding = scoring.is_masked_BW, ((0, 0), (1, 0))
    total_BW = np.pad(np.where(is_masked_BW, scoring.confidence_BW, 0.0).cumsum(axis=1, dtype=np.float64), padding)
    count_BW = np.pad(is_masked_BW.cumsum(axis=1), padding)
    span = min(scoring.settings.block_size, is_masked_BW.shape[1])
    num_BW = count_BW[:, span:] - count_BW[:, :-span]
    mean_BW = (total_BW[:, span:] - total_BW[:, :-span]) / np.maximum(num_BW, 1)
    worst_B: Score = np.where(num_BW > 0, mean_BW, np.inf).min(axis=1)
    worst_B[~np.isfinite(worst_B)] = NO_MASK_LEFT
    return worst_B


@_rule("branch_scores", "random")
def random_score(scoring: Scoring) -> Score:
    return scoring.draws.generator().random(len(scoring.branches))


@_rule("branch_scores")
def anchor(scoring: Scoring) -> Score:
    return np.array([not branch.fills for branch in scoring.branches], dtype=np.float64)


@_rule("branch_scores")
def lookahead(scoring: Scoring) -> Score:
    return 1 - anchor(scoring)


@_rule("spawn_rules")
def confident(spawning: Spawning) -> Float:
    return spawning.confidence_C


@_rule("spawn_rules")
def uncertain(spawning: Spawning) -> Float:
    return -spawning.confidence_C


@_rule("spawn_rules")
def near(spawning: Spawning, *, probability: float = 0.6) -> Float:
    """Masks whose token is about as probable as this."""
    distance_C: Float = np.abs(spawning.probability_C - np.float32(probability))
    return -distance_C


@_rule("spawn_rules", "random")
def random_rank(spawning: Spawning) -> Score:
    return spawning.draws.generator().random(len(spawning.column_C))


@_rule("spawn_rules")
def mixed(spawning: Spawning, *, share: float = 0.5) -> Score:
    """The most confident masks, and random ones beside them. share: of the confident ones among the lookaheads."""
    rank_C = random_rank(spawning)
    best = np.argsort(-spawning.confidence_C, kind="stable")[: round(share * spawning.settings.num_lookahead)]
    rank_C[best] = 1 + np.arange(len(best), 0, -1)
    return rank_C


@_rule("spawn_rules")
def spread(spawning: Spawning) -> Score:
    """Evenly over the masks' confidences, from the most confident to the least."""
    num_masks = len(spawning.column_C)
    chosen = np.linspace(0, num_masks - 1, min(spawning.settings.num_lookahead, num_masks)).round().astype(np.int64)
    order_C = np.argsort(-spawning.confidence_C, kind="stable")
    rank_C = np.zeros(num_masks)
    rank_C[order_C[chosen]] = np.arange(len(chosen), 0, -1)
    return rank_C


@_rule("fill_rules")
def threshold(filling: Filling) -> Bool:
    """All above `skip_threshold`, or else the most confident one."""
    return _or_most_confident(filling.probability_M > filling.settings.skip_threshold, filling)


@_rule("fill_rules")
def agreed(filling: Filling, *, share: float = 1.0) -> Bool:
    """Fill those of `threshold` that a share of the branches predicts as the winner does."""
    token_BM = filling.values_3BM[0]
    is_agreed_M = (token_BM == token_BM[filling.winner]).mean(axis=0) >= share
    return _or_most_confident((filling.probability_M > filling.settings.skip_threshold) & is_agreed_M, filling)


@_rule("fill_rules")
def entropy(filling: Filling) -> Bool:
    """All whose entropy is below `entropy_threshold`, or else the one of the lowest; confidence is its negative."""
    return _or_most_confident(-filling.confidence_M < filling.settings.entropy_threshold, filling)


@_rule("fill_rules")
def static(filling: Filling) -> Bool:
    """The `quota` most confident; of equal ones the first."""
    return _marked(np.argsort(-filling.confidence_M, kind="stable")[: filling.quota], filling)


@_rule("fill_rules")
def dynamic(filling: Filling) -> Bool:
    """All above `skip_threshold` if they are `quota` or more, or else the `quota` most confident."""
    is_sure_M: Bool = filling.probability_M > filling.settings.skip_threshold
    return is_sure_M if is_sure_M.sum() >= filling.quota else static(filling)


@_rule("fill_rules")
def sequential(filling: Filling) -> Bool:
    """The first `quota`."""
    return np.arange(len(filling.confidence_M)) < filling.quota


@_rule("fill_rules")
def entropy_bounded(filling: Filling) -> Bool:
    """Fill those of the lowest entropies whose sum stays below `entropy_bound`."""
    order_M = np.argsort(-filling.confidence_M, kind="stable")
    total_M = np.cumsum(-filling.confidence_M[order_M], dtype=np.float64)
    return _marked(order_M[: max(1, int((total_M < filling.settings.entropy_bound).sum()))], filling)


@_rule("fill_rules")
def factor(filling: Filling) -> Bool:
    """The n most probable before the first one, from the second on, whose p is below 1 - factor / (its rank + 1); all
    where there is none. Where the very last is the first such one, all too, as Fast-dLLM's code does."""
    probability_M = filling.probability_M
    order_M = np.argsort(-probability_M, kind="stable")
    rank_M = np.arange(1, len(order_M) + 1)
    is_below_M = (probability_M[order_M] < 1 - filling.settings.factor / (rank_M + 1)) & (rank_M >= 2)
    first = int(is_below_M.argmax()) if is_below_M.any() else len(order_M)
    return _marked(order_M[: len(order_M) if first == len(order_M) - 1 else first], filling)


@_rule("fill_rules")
def frechet(filling: Filling, *, delta: float = 0.25) -> Bool:
    """The longest beginning of the most probable masks for which sum(p) - (n - 1) - (1 - p_n) stays above `delta`."""
    order_M = np.argsort(-filling.probability_M, kind="stable")
    sorted_M = filling.probability_M[order_M].astype(np.float64)
    bound_M = sorted_M.cumsum() - np.arange(len(order_M)) - (1 - sorted_M)
    count = int((bound_M > delta + 1e-12).cumprod().sum())
    return _marked(order_M[: max(1, count)], filling)


def _or_most_confident(is_sure_M: Bool, filling: Filling) -> Bool:
    return is_sure_M if is_sure_M.any() else _marked(filling.confidence_M.argmax(), filling)


def _marked(chosen: Int | np.int64, filling: Filling) -> Bool:
    is_chosen_M = np.zeros(len(filling.confidence_M), dtype=np.bool_)
    is_chosen_M[chosen] = True
    return is_chosen_M


@_rule("lookahead_rules", "all")
def every(stepped: Stepped) -> int:
    return int(stepped.settings.num_lookahead)


@_rule("lookahead_rules")
def stalled(stepped: Stepped, *, plenty: float = 4, share: float = 0.5) -> int:
    """All k after a step that filled little, a share of them after one that filled much."""
    most: int = stepped.settings.num_lookahead
    return most if stepped.num_filled < plenty else round(share * most)
