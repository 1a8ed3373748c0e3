"""Branch confidence C(B) and the winners: over all rows at once where it is a mean, else by request.

Shapes: N requests, R rows, T entries; B branches and W window positions of one request.
"""

from __future__ import annotations

import numpy as np

from common.decoding.plan import Bool, Float, Int, Score
from common.decoding.scheduling.arrays.rows import NUM_MASKED, OPENED, Rows
from common.decoding.scheduling.rules import Lookahead
from common.policies import NO_MASK_LEFT, Draws, Scoring, kept, policy


def score_rows(rows: Rows, is_scored_T: Bool, values_3T: Float) -> Score:
    """[R]. is_scored_T: entries that predict a masked position of their row."""
    batch = rows.batch
    if batch.kind.branch_score == "mean" and batch.kind.bottom_share >= 1:
        score_R = _mean_scores(rows, is_scored_T, values_3T[2])
    else:
        parts = [_own_score(rows, place, values_3T) for place in range(len(batch))]
        score_R = np.concatenate(parts)
    if batch.is_weighted:
        weight_R = batch.creation_weight_N[rows.request_R]
        created_R = batch.confidence_NB.reshape(-1)[rows.branches.branch_R]
        created_R[rows.branches.is_lookahead_R == 0] = 1
        score_R = np.where(weight_R > 0, weight_R * created_R + (1 - weight_R) * score_R, score_R)
    return score_R


def best_rows(rows: Rows, score_R: Score) -> Int:
    """Each request's row of the highest score; of equal ones the first."""
    score_NB = np.empty(rows.batch.confidence_NB.shape)
    score_NB.fill(-np.inf)
    score_NB.reshape(-1)[rows.branches.branch_R] = score_R
    best_N: Int = rows.branches.first_row_N + score_NB.argmax(axis=1)
    return best_N


def _mean_scores(rows: Rows, is_scored_T: Bool, confidence_T: Float) -> Score:
    """Mean confidence of the masked positions of every row."""
    batch, request_R = rows.batch, rows.request_R
    total_R = np.add.reduceat(kept(confidence_T, is_scored_T), rows.first_R, dtype=np.float64)
    if batch.kind.shift_row == "stale":
        is_masked_N = batch.tokens.is_masked_S[batch.offset_N + batch.start_N]
        if np.count_nonzero(is_masked_N):
            total_R += (batch.carry_3N[2] * is_masked_N)[request_R] * (rows.position_R != rows.start_R)
    num_masked_R = _num_masked(rows)
    num_masked_R -= rows.branches.is_lookahead_R
    if np.count_nonzero(num_masked_R) == len(num_masked_R):
        mean_R: Score = total_R / num_masked_R
        return mean_R
    mean_R = total_R / np.maximum(num_masked_R, 1)
    mean_R[num_masked_R == 0] = NO_MASK_LEFT
    return mean_R


def _num_masked(rows: Rows) -> Int:
    """Masks in every row's window, its own token's place among them."""
    batch = rows.batch
    if batch.kind.cache == "prefix":
        own_R = rows.fields_FR[NUM_MASKED]
    else:
        block_N = batch.before_N + batch.first_open_N  # the only one, once the cache has been rebuilt
        own_R = np.where(batch.is_refreshed_N, batch.num_masked_X[block_N], batch.num_masked_N)[rows.request_R]
    num_masked_R: Int = rows.fields_FR[OPENED] + own_R
    return num_masked_R


def _own_score(rows: Rows, place: int, values_3T: Float) -> Score:
    """[B]: of one request's rows, by a rule that looks at a window as a whole."""
    batch = rows.batch
    first, count = int(rows.branches.first_row_N[place]), int(batch.num_branches_N[place])
    own = slice(first, first + count)
    start, width = int(batch.start_N[place]), int(rows.num_keys_R[own].max())
    values_3BW = np.zeros((3, count, width), dtype=np.float32)
    is_masked_BW = np.zeros((count, width), dtype=np.bool_)
    is_masked_W = batch.requests[place].is_masked_S[start : start + width]
    spans = zip(rows.first_R[own].tolist(), rows.num_keys_R[own].tolist(), rows.position_R[own].tolist(), strict=True)
    for branch, (begin, num_keys, position) in enumerate(spans):
        values_3BW[:, branch, 1:num_keys] = values_3T[:, begin : begin + num_keys - 1]
        is_masked_BW[branch, :num_keys] = is_masked_W[:num_keys]
        if position >= 0:
            is_masked_BW[branch, position - start] = False
    values_3BW[:, :, 0] = batch.carry_3N[:, place, None]
    if rows.shifts is not None:
        row_X, start_X, entry_X = rows.shifts
        is_own_X = (row_X >= own.start) & (row_X < own.stop)
        values_3BW[:, row_X[is_own_X] - first, start_X[is_own_X] - start] = values_3T[:, entry_X[is_own_X]]
    created = [*batch.confidence_NB[place, : count - 1].tolist(), 1.0]
    tried = zip(rows.position_R[own].tolist(), rows.token_R[own].tolist(), created, strict=True)
    branches = [Lookahead(position if position >= 0 else None, token, created) for position, token, created in tried]
    settings, draws = batch.requests[place].rules.decode, Draws(*batch.key_of(place), stream=0)
    scoring = Scoring(values_3BW, is_masked_BW, branches, start, settings, draws, is_masked_BW.sum(axis=1))
    score = policy("branch_scores", batch.kind.branch_score)
    score_B: Score | None = batch.requests[place].asked(score, scoring)
    return np.zeros(count) if score_B is None else score_B
