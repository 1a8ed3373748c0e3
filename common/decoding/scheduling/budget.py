"""How many lookaheads a step can afford: those that bring more tokens than the time of their rows is worth.

The time of a pass by its number of tokens is measured before the first request. What a lookahead is worth is learnt
from the passes themselves: every pass tells how many tokens each branch would bring at once, so also what the winner
among fewer branches would have brought. Both are the same on every rank, and so are the decisions.

Shapes: N requests in a step's order, K lookaheads of a request, R rows.
"""

from __future__ import annotations

import numpy as np

from common.decoding.engine import PassCosts
from common.decoding.plan import Int, Predictions, Score, StepPlan

# Before anything is learnt: n branches bring n^0.4 times the tokens of one, as measured and published
# (docs/results.md); so much weight has it, in requests seen.
_PRIOR_EXPONENT = 0.4
_PRIOR_TOKENS = 4.0
_PRIOR_WEIGHT = 32.0
_MEMORY = 4096.0  # requests seen after which an observation counts e times less
# Part of what a lookahead brings at once the next passes would have brought without it. On the demo model's problems
# k = 1, 3, 7 bring 1.65, 2.2 and 2.65 times the tokens of k = 0 in whole answers; at once they bring 2.1, 2.65 and 3.3.
_LASTING = 0.7
_LEARN_EVERY = 4  # passes
_EXPLORE_EVERY = 64  # passes: then one request gets all of its lookaheads, whatever they cost


class BranchBudget:
    """costs: of this engine and model. most: lookaheads of a request at the most."""

    def __init__(self, costs: PassCosts, most: int, num_slots: int) -> None:
        self._costs = costs
        branches = np.arange(1, most + 2, dtype=np.float64)
        worth = np.diff(_PRIOR_TOKENS * branches**_PRIOR_EXPONENT, prepend=0.0)
        worth[1:] /= _LASTING
        self._weight = np.full(most + 1, _PRIOR_WEIGHT)
        self._total = worth * self._weight
        self._worth = self._present_worth()
        self._rank_K = np.arange(most)
        self._tokens_of_slot = np.zeros(num_slots, dtype=np.int64)
        self._skip_threshold_of_slot = np.zeros(num_slots, dtype=np.float32)
        self._num_passes = 0

    @property
    def worth(self) -> Score:
        """[1 + K]: tokens a pass of the anchor alone, and what each further lookahead adds; never more than the one
        before it."""
        return self._worth

    @property
    def is_learning(self) -> bool:
        """Whether `learn` is called after the pass that was dealt last."""
        return self._num_passes % _LEARN_EVERY == 0

    def admit(self, slot: int, num_tokens: int, skip_threshold: float) -> None:
        """Note a new request: tokens of its first row, and the probability above which its masks are filled."""
        self._tokens_of_slot[slot] = num_tokens
        self._skip_threshold_of_slot[slot] = skip_threshold

    def deal(self, slot_N: Int, num_spawned_N: Int) -> Int:
        """Return how many of its lookaheads each request may try in the coming step."""
        self._num_passes += 1
        if self._num_passes % _EXPLORE_EVERY:
            return self._dealt(slot_N, num_spawned_N)
        kept_N: Int = self._dealt(slot_N, num_spawned_N).copy()
        lucky = self._num_passes // _EXPLORE_EVERY % len(slot_N)
        kept_N[lucky] = num_spawned_N[lucky]
        return kept_N

    def _dealt(self, slot_N: Int, num_spawned_N: Int) -> Int:
        most = int(num_spawned_N.max())
        if not most:
            return num_spawned_N
        tokens_N = self._tokens_of_slot[slot_N]
        request_X, rank_X = (self._rank_K[:most] < num_spawned_N[:, None]).nonzero()
        gain_X, cost_X = self._worth[1:].take(rank_X), tokens_N.take(request_X)
        order_X: Int = (gain_X / -cost_X).argsort(kind="stable")  # a request's own stay in their order
        gained_X, spent_X = np.empty(len(order_X) + 1), np.empty(len(order_X) + 1)
        gained_X[0], spent_X[0] = self._worth[0] * len(slot_N), tokens_N.sum()
        gained_X[1:], spent_X[1:] = gain_X[order_X], cost_X[order_X]
        rate_X = gained_X.cumsum() / (self._costs.at(spent_X.cumsum()) + self._costs.host_s(len(slot_N)))
        kept_N: Int = np.bincount(request_X[order_X[: rate_X.argmax()]], minlength=len(slot_N))
        return kept_N

    def note(self, plan: StepPlan) -> None:
        """Note how many entries a branch of each request costs in this pass, those of its guiding row included: the
        anchor's, which comes last of its request."""
        self._tokens_of_slot[plan.slot_R] = plan.num_entries_R * (2 if plan.num_guiding_rows else 1)
        for span in plan.commits:
            self._tokens_of_slot[span.slot] -= min(span.length, self._tokens_of_slot[span.slot] - 1)

    def learn(self, plan: StepPlan, predictions: Predictions, score_R: Score) -> None:
        """Learn from a pass what its branches would have brought. score_R: C(B)."""
        request_R, num_entries_R = plan.request_R[plan.scored], plan.num_entries_R[plan.scored]
        count_N = np.bincount(request_R)
        last_N = count_N.cumsum() - 1
        threshold_T = self._skip_threshold_of_slot[plan.slot_R[plan.scored]].repeat(num_entries_R)
        own = slice(len(threshold_T))
        is_sure_T = (predictions.probability_T[own] > threshold_T) & plan.is_read_T[own]
        brought_R = np.add.reduceat(is_sure_T, plan.first_R[plan.scored], dtype=np.int64)
        rank_R = np.arange(len(request_R)) - (last_N + 1 - count_N)[request_R]
        self._observe(count_N - 1, np.maximum(brought_R, 1), score_R, request_R, rank_R, last_N)

    def _observe(
        self, spawned_N: Int, brought_R: Int, score_R: Score, request_R: Int, rank_R: Int, last_N: Int
    ) -> None:
        """Find the winner among the anchor and the first lookaheads, one lookahead more at a time."""
        most = int(spawned_N.max())
        if not most:
            return
        is_tried_N = spawned_N > 0
        score_NK = np.full((len(spawned_N), most + 1), -np.inf)
        brought_NK = np.zeros(score_NK.shape, dtype=np.int64)
        score_NK[request_R, rank_R] = score_R
        brought_NK[request_R, rank_R] = brought_R + 1  # the lookahead's own token
        best_N, tokens_N = score_R[last_N], brought_R[last_N]
        self._add(0, tokens_N[is_tried_N])
        is_anchor_N = np.ones(len(spawned_N), dtype=np.bool_)
        for rank in range(most):
            is_better_N = np.where(is_anchor_N, score_NK[:, rank] >= best_N, score_NK[:, rank] > best_N)
            is_better_N &= rank < spawned_N
            found_N = np.where(is_better_N, brought_NK[:, rank], tokens_N)
            self._add(1 + rank, (found_N - tokens_N)[rank < spawned_N])
            best_N, tokens_N = np.where(is_better_N, score_NK[:, rank], best_N), found_N
            is_anchor_N &= ~is_better_N
        self._worth = self._present_worth()

    def _present_worth(self) -> Score:
        worth: Score = self._total / self._weight
        worth[1:] = _LASTING * np.minimum.accumulate(np.maximum(worth[1:], 0.0))
        return worth

    def _add(self, place: int, seen_N: Int) -> None:
        if place >= len(self._weight) or not seen_N.size:
            return
        kept = np.exp(-seen_N.size / _MEMORY)
        self._weight[place] = self._weight[place] * kept + seen_N.size
        self._total[place] = self._total[place] * kept + seen_N.sum()
