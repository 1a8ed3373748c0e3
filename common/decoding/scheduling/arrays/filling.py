"""From the winners of a step to the next anchors and their lookaheads: adopt the branch, fill what is sure, spawn what
to try.

Shapes: N requests, B branches, K lookaheads; Q blocks that may be filled, of all requests, and W their
positions; C positions that may be filled, of one request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.decoding.plan import Bool, Float, Int
from common.decoding.scheduling.arrays.batch import ANCHOR, RequestBatch
from common.decoding.scheduling.arrays.rows import Rows, Spread, spread
from common.decoding.scheduling.arrays.strategies import STRATEGIES
from common.policies import Draws, Spawning, Stepped, policy

_FEW_VALUES = 1024  # that a sort of all is as fast as a search for the largest, one after another


class OpenBlocks(NamedTuple):
    """The blocks that may be filled, with what the winners predict of them.

    spread: the requests'. block_Q: the block. count_N: of each request. values_3QW: token, probability, confidence.
    place_QW: in the token table.
    """

    spread: Spread
    block_Q: Int
    count_N: Int
    values_3QW: Float
    place_QW: Int
    is_masked_QW: Bool


def adopt(rows: Rows, winner_row_N: Int) -> Bool:
    """The winners become the anchors: the block each opened, its activations and its token; which of them are
    lookaheads."""
    batch, size = rows.batch, rows.batch.kind.block_size
    opens_N, position_N = rows.opens_R[winner_row_N], rows.position_R[winner_row_N]
    batch.num_blocks_N += opens_N
    batch.num_masked_N += opens_N * size
    is_lookahead_N: Bool = position_N >= 0
    won_N = is_lookahead_N.nonzero()[0]
    if won_N.size:
        position_N, token_N = position_N[won_N], rows.token_R[winner_row_N[won_N]]
        batch.num_masked_NM[won_N, (position_N - batch.origin_N[won_N]) // size] -= 1
        batch.num_masked_N -= is_lookahead_N
        place_S = batch.offset_N[won_N] + position_N
        batch.tokens.token_S[place_S] = token_N
        batch.tokens.is_masked_S[place_S] = False
        batch.note_ends(won_N[token_N == batch.eos_N[won_N]])
    batch.is_activated_NM[:, 1:] |= batch.num_masked_NM[:, :-1] <= batch.activation_limit_N[:, None]
    return is_lookahead_N


def open_blocks(rows: Rows, winner_row_N: Int, values_3T: Float) -> OpenBlocks:
    """Behind `adopt`."""
    batch, size = rows.batch, rows.batch.kind.block_size
    count_N = STRATEGIES[batch.kind.strategy].end_of_fillable(batch) - batch.first_open_N
    blocks = spread(count_N)
    request_Q, column_QW = blocks.owner_X, (blocks.index_X * size)[:, None] + np.arange(size)
    place_QW = (batch.next_N + batch.offset_N)[request_Q][:, None] + column_QW
    entry_N = rows.first_R[winner_row_N] + batch.next_N - batch.start_N - 1
    values_3QW = values_3T.take(entry_N[request_Q][:, None] + column_QW, axis=1, mode="clip")
    behind_cache_N = ((batch.next_N == batch.start_N) & (count_N > 0)).nonzero()[0]
    if behind_cache_N.size:
        values_3QW[:, blocks.begin_N[behind_cache_N], 0] = batch.carry_3N[:, behind_cache_N]
    block_Q = blocks.index_X + batch.first_open_N[request_Q]
    found = OpenBlocks(blocks, block_Q, count_N, values_3QW, place_QW, batch.tokens.is_masked_S[place_QW])
    if rows.shifts is not None:
        _take_shifts(rows, winner_row_N, found, values_3T)
    return found


def _take_shifts(rows: Rows, winner_row_N: Int, blocks: OpenBlocks, values_3T: Float) -> None:
    """Shift entries predict the first positions of their blocks."""
    assert rows.shifts is not None
    row_X, start_X, entry_X = rows.shifts
    batch, request_X = rows.batch, rows.request_R[row_X]
    index_X = (start_X - batch.next_N[request_X]) // batch.kind.block_size
    is_won_X = (row_X == winner_row_N[request_X]) & (index_X >= 0) & (index_X < blocks.count_N[request_X])
    place_X = blocks.spread.begin_N[request_X[is_won_X]] + index_X[is_won_X]
    blocks.values_3QW[:, place_X, 0] = values_3T[:, entry_X[is_won_X]]


def fill(batch: RequestBatch, blocks: OpenBlocks) -> tuple[Bool, Int]:
    """Fill every mask above tau_conf; an activated block without one fills its most confident mask. Which positions,
    and how many of each request."""
    request_Q, is_masked_QW, values_3QW = blocks.spread.owner_X, blocks.is_masked_QW, blocks.values_3QW
    block_QQ = request_Q, blocks.block_Q
    is_chosen_QW = values_3QW[1] > batch.skip_threshold_N[request_Q][:, None]
    is_chosen_QW &= is_masked_QW
    num_chosen_Q = np.add.reduce(is_chosen_QW, axis=1, dtype=np.int64)
    num_masked_Q = batch.num_masked_NM[block_QQ]
    stuck_Q = ((num_chosen_Q < batch.is_activated_NM[block_QQ]) & (num_masked_Q > 0)).nonzero()[0]
    if stuck_Q.size:
        confidence_QW = values_3QW[2].take(stuck_Q, axis=0)
        np.putmask(confidence_QW, ~is_masked_QW.take(stuck_Q, axis=0), -np.inf)
        is_chosen_QW[stuck_Q, confidence_QW.argmax(axis=1)] = True
        num_chosen_Q[stuck_Q] = 1
        for place in request_Q[stuck_Q].tolist():
            batch.requests[place].num_forced_fills += 1
    batch.num_masked_NM[block_QQ] = num_masked_Q - num_chosen_Q
    chosen_S = is_chosen_QW.reshape(-1).nonzero()[0]
    place_S = blocks.place_QW.take(chosen_S)
    token_S = values_3QW[0].take(chosen_S).astype(np.int64)
    batch.tokens.token_S[place_S] = token_S
    batch.tokens.is_masked_S[place_S] = False
    request_S = request_Q.repeat(num_chosen_Q)
    batch.note_ends(request_S[token_S == batch.eos_N[request_S]])
    np.greater(is_masked_QW, is_chosen_QW, out=is_masked_QW)  # and not
    num_filled_N = np.bincount(request_S, minlength=len(batch))
    batch.num_masked_N -= num_filled_N
    return is_chosen_QW, num_filled_N


def carry(rows: Rows, winner_row_N: Int, values_3T: Float) -> None:
    """Keep what the winners predict of the first position behind what is being committed. Before `settle`."""
    batch = rows.batch
    if batch.kind.shift_row == "stale":
        place_N = batch.commit_N.nonzero()[0]
        if place_N.size:
            entry_N = rows.entry_of(winner_row_N[place_N], batch.next_N[place_N]) - 1
            batch.carry_3N[:, place_N] = values_3T[:, entry_N]


def spawn(batch: RequestBatch, blocks: OpenBlocks, num_filled_N: Int) -> None:
    """Up to k lookaheads of every request, each the anchor plus one more of its remaining masks; then the anchor.
    Behind `settle`. num_filled_N: by the fill rule in this step."""
    size = batch.kind.block_size
    candidates_N, rank_NC = _ranks(batch, blocks)
    num_spawned_N = np.minimum(_most(batch, num_filled_N, candidates_N), candidates_N)
    most = max(num_spawned_N.tolist())
    if most:
        order_NK = _lowest(rank_NC, most)
        begin_N1 = blocks.spread.begin_N[:, None]
        batch.branch_2NB[0, :, :most] = batch.next_N[:, None] + order_NK
        place_NK = begin_N1 * size + order_NK
        values_3NK = blocks.values_3QW.reshape(3, -1).take(place_NK, axis=1, mode="clip")
        with np.errstate(invalid="ignore"):  # behind a request's last lookahead stands anything
            batch.branch_2NB[1, :, :most] = values_3NK[0]
        batch.confidence_NB[:, :most] = values_3NK[2]
    batch.branch_2NB[:, batch.place_N, num_spawned_N] = ANCHOR
    batch.confidence_NB[batch.place_N, num_spawned_N] = 1
    np.add(num_spawned_N, 1, out=batch.num_branches_N)


def _ranks(batch: RequestBatch, blocks: OpenBlocks) -> tuple[Int, Float]:
    """How many masks of each request may be tried, and the rank of each of its positions: the lowest are tried first,
    infinity is never."""
    _, request_Q, index_Q = blocks.spread
    is_masked_QW, candidates_N = blocks.is_masked_QW, batch.num_masked_N
    if batch.kind.spawn_blocks == "first":
        is_masked_QW = is_masked_QW & (blocks.block_Q == batch.first_open_N[request_Q])[:, None]
    if batch.kind.spawn_blocks == "first" or batch.kind.strategy == "fast_dllm":
        num_masked_Q = np.add.reduce(is_masked_QW, axis=1, dtype=np.int64)
        candidates_N = np.bincount(request_Q, num_masked_Q, minlength=len(batch)).astype(np.int64)
    if batch.kind.spawn_rule == "confident":
        rank_QW = -blocks.values_3QW[2]
        np.putmask(rank_QW, ~is_masked_QW, np.inf)
    else:
        rank_QW = _own_ranks(batch, blocks, is_masked_QW, candidates_N)
    num_requests, widest, size = len(batch), max(blocks.count_N.tolist()), is_masked_QW.shape[1]
    rank_NQW = np.full((num_requests, widest, size), np.inf, dtype=rank_QW.dtype)
    rank_NQW[request_Q, index_Q] = rank_QW
    return candidates_N, rank_NQW.reshape(num_requests, widest * size)


def _own_ranks(batch: RequestBatch, blocks: OpenBlocks, is_masked_QW: Bool, candidates_N: Int) -> Float:
    """By a rule that looks at one request's masks together."""
    rank, rank_QW = policy("spawn_rules", batch.kind.spawn_rule), np.full(is_masked_QW.shape, np.inf)
    width, values_3X = is_masked_QW.shape[1], blocks.values_3QW.reshape(3, -1)
    for place, first in enumerate(blocks.spread.begin_N.tolist()):
        if candidates_N[place]:
            own = slice(first, first + int(blocks.count_N[place]))
            values_3W = values_3X[:, own.start * width : own.stop * width]
            column_C, start = is_masked_QW[own].ravel().nonzero()[0], int(batch.next_N[place])
            settings, draws = batch.requests[place].rules.decode, Draws(*batch.key_of(place), stream=1)
            found = np.full(len(values_3W[0]), np.inf)
            found[column_C] = -rank(Spawning(values_3W, column_C, start, settings, draws))
            rank_QW[own] = found.reshape(-1, width)
    return rank_QW


def _most(batch: RequestBatch, num_filled_N: Int, candidates_N: Int) -> Int:
    """Lookaheads of each request's next step, by `lookahead_rule`."""
    if batch.kind.lookahead_rule == "all":
        return batch.num_lookahead_N
    count = policy("lookahead_rules", batch.kind.lookahead_rule)
    stepped = zip(num_filled_N.tolist(), candidates_N.tolist(), batch.requests, strict=True)
    found = [count(Stepped(filled, masked, request.rules.decode)) for filled, masked, request in stepped]
    most_N: Int = np.minimum(found, batch.num_lookahead_N)
    return most_N


def _lowest(rank_NC: Float, count: int) -> Int:
    """[N, count]: where the lowest of each row are, in order; ties go to the earlier position."""
    if rank_NC.size <= _FEW_VALUES or count > 16:
        return rank_NC.argsort(axis=1, kind="stable")[:, :count]
    order_KN = np.empty((count, len(rank_NC)), dtype=np.int64)
    begin_N, rank_X = np.arange(len(rank_NC)) * rank_NC.shape[1], rank_NC.reshape(-1)  # a view
    for lowest_N in order_KN:
        rank_NC.argmin(axis=1, out=lowest_N)
        rank_X[begin_N + lowest_N] = np.inf
    order_NK: Int = order_KN.T
    return order_NK
