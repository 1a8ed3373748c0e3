"""From the winners of a step to the next anchors and their lookaheads: adopt the branch, fill what is sure, spawn what
to try.

Shapes: N requests, B branches, K lookaheads; Q blocks that may be filled, of all requests, and W their
positions; C positions that may be filled, of one request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.decoding.plan import Bool, Float, Int
from common.decoding.scheduling.arrays.batch import RequestBatch
from common.decoding.scheduling.arrays.counting import ONE, counting
from common.decoding.scheduling.arrays.rows import OPENED, POSITION, SHIFT, Rows
from common.decoding.scheduling.arrays.strategies import STRATEGIES
from common.policies import Draws, Spawning, Stepped, policy

_INFINITY_BITS = np.array(np.inf, dtype=np.float32).view(np.int32)
_FEW_VALUES = 1024  # that a sort of all is as fast as a search for the largest, one after another


class OpenBlocks(NamedTuple):
    """The blocks that may be filled, with what the winners predict of them.

    request_Q: whose each is. begin_N, count_N: where each request's positions begin, and how many blocks they are.
    widest: the most of one request. block_Q: where the block is in num_masked_X. padded_Q: which it were if every
    request had the most.
    values_3QW: token, probability, confidence. place_QW: in the token table.
    """

    request_Q: Int
    begin_N: Int
    count_N: Int
    widest: int
    block_Q: Int
    padded_Q: Int
    values_3QW: Float
    place_QW: Int
    is_masked_QW: Bool


def winners_of(rows: Rows, winner_row_N: Int) -> Int:
    """Rows.fields_FR of every request's winner."""
    return rows.fields_FR.take(winner_row_N, axis=1)


def adopt(batch: RequestBatch, winner_FN: Int) -> Bool:
    """The winners become the anchors: the block each opened and its token; which of them are lookaheads."""
    opened_N = winner_FN[OPENED]
    batch.num_blocks_N += opened_N // batch.size
    batch.num_masked_N += opened_N
    is_lookahead_N: Bool = winner_FN[POSITION] >= 0
    won_N = is_lookahead_N.nonzero()[0]
    if won_N.size:
        position_N, token_N = winner_FN[POSITION:OPENED].take(won_N, axis=1)
        block_N = (position_N - batch.origin_N[won_N]) // batch.size
        block_N += batch.before_N[won_N]
        batch.num_masked_X[block_N] -= ONE
        batch.num_masked_N -= is_lookahead_N
        position_N += batch.offset_N[won_N]
        batch.tokens.token_S[position_N] = token_N
        batch.tokens.is_masked_S[position_N] = False
        batch.note_ends(won_N, token_N)
    return is_lookahead_N


def open_blocks(rows: Rows, winner_row_N: Int, winner_FN: Int, values_3T: Float) -> OpenBlocks:
    """Behind `adopt`."""
    batch, place_N = rows.batch, rows.batch.place_N
    count_N = STRATEGIES[batch.kind.strategy].end_of_fillable(batch) - batch.first_open_N
    begin_N, counts = np.add.accumulate(count_N) - count_N, count_N.tolist()
    widest = max(counts)
    # Of each request's first block in num_masked_X, in the padded order, among the entries and in the token table, less
    # what its place among all blocks adds.
    of_first_4N = np.empty((4, len(place_N)), dtype=np.int64)
    block_N, padded_N, entry_N, table_N = of_first_4N
    np.subtract(batch.before_N + batch.first_open_N, begin_N, out=block_N)
    np.subtract(place_N * widest, begin_N, out=padded_N)
    begin_N = begin_N * batch.size
    np.subtract(batch.next_N - winner_FN[SHIFT], begin_N, out=entry_N)
    np.subtract(batch.next_N + batch.offset_N, begin_N, out=table_N)
    request_Q = place_N.repeat(count_N)
    block_Q, padded_Q, entry_Q, place_Q = of_first_4N.take(request_Q, axis=1)
    count_Q = counting(len(request_Q))
    block_Q += count_Q
    padded_Q += count_Q
    count_Q = count_Q * batch.size
    entry_Q += count_Q
    place_Q += count_Q
    place_QW = place_Q[:, None] + batch.column_W
    values_3QW = values_3T.take(entry_Q[:, None] + batch.before_W, axis=1, mode="clip")
    behind_cache_N = (batch.next_N == batch.start_N).nonzero()[0]
    if 0 in counts:
        behind_cache_N = behind_cache_N[count_N[behind_cache_N] > 0]
    if behind_cache_N.size:
        first_N = begin_N[behind_cache_N]
        values_3QW.reshape(3, -1)[:, first_N] = batch.carry_3N.take(behind_cache_N, axis=1)
    is_masked_QW = batch.tokens.is_masked_S.take(place_QW)
    found = OpenBlocks(request_Q, begin_N, count_N, widest, block_Q, padded_Q, values_3QW, place_QW, is_masked_QW)
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
    place_X = blocks.begin_N[request_X[is_won_X]] + index_X[is_won_X] * batch.kind.block_size
    blocks.values_3QW.reshape(3, -1)[:, place_X] = values_3T[:, entry_X[is_won_X]]


def ranks_of(blocks: OpenBlocks) -> Float:
    """[Q, W]: ascending with falling confidence; infinite where there is no mask."""
    bits_QW = (-blocks.values_3QW[2]).view(np.int32)  # what is written by masks that follow no pattern takes longer
    bits_QW -= _INFINITY_BITS
    bits_QW *= blocks.is_masked_QW
    bits_QW += _INFINITY_BITS
    rank_QW: Float = bits_QW.view(np.float32)
    return rank_QW


def fill(batch: RequestBatch, blocks: OpenBlocks, rank_QW: Float) -> tuple[Bool, Int]:
    """Fill every mask above tau_conf; an activated block without one fills its most confident mask. Which positions,
    and how many of each request. rank_QW: of `ranks_of`, afterwards of the masks that are left."""
    request_Q, block_Q, values_3QW = blocks.request_Q, blocks.block_Q, blocks.values_3QW
    is_chosen_QW = values_3QW[1] > batch.skip_threshold_N[request_Q][:, None]
    is_chosen_QW &= blocks.is_masked_QW
    chosen_S = is_chosen_QW.reshape(-1).nonzero()[0]
    block_S = chosen_S // batch.size
    num_chosen_Q = np.bincount(block_S, minlength=len(request_Q))
    num_masked_Q = batch.num_masked_X[block_Q]
    is_activated_Q = batch.num_before_X[block_Q] <= batch.activation_limit_N[request_Q]
    stuck_Q = (np.minimum(num_masked_Q, is_activated_Q) > num_chosen_Q).nonzero()[0]
    if stuck_Q.size:
        best_S = stuck_Q * batch.size + rank_QW[stuck_Q].argmin(axis=1)
        is_chosen_QW.reshape(-1)[best_S] = True
        num_chosen_Q[stuck_Q] = 1
        chosen_S, block_S = np.concatenate((chosen_S, best_S)), np.concatenate((block_S, stuck_Q))
        requests = batch.requests
        for place in request_Q[stuck_Q].tolist():
            requests[place].num_forced_fills += 1
    batch.num_masked_X[block_Q] = num_masked_Q - num_chosen_Q
    place_S = blocks.place_QW.reshape(-1)[chosen_S]
    token_S = values_3QW[0].reshape(-1)[chosen_S].astype(np.int64)
    batch.tokens.token_S[place_S] = token_S
    batch.tokens.is_masked_S[place_S] = False
    rank_QW.reshape(-1)[chosen_S] = np.inf
    request_S = request_Q[block_S]
    batch.note_ends(request_S, token_S)
    num_filled_N = np.bincount(request_S, minlength=len(batch))
    batch.num_masked_N -= num_filled_N
    return is_chosen_QW, num_filled_N


def carry(batch: RequestBatch, winner_FN: Int, values_3T: Float) -> None:
    """Keep what the winners predict of the first position behind what is being committed. Before `settle`."""
    if batch.kind.shift_row == "stale":
        place_N = batch.commit_N.nonzero()[0]
        if place_N.size:
            entry_N = (batch.next_N - winner_FN[SHIFT])[place_N] - ONE
            batch.carry_3N[:, place_N] = values_3T.take(entry_N, axis=1)


def spawn(batch: RequestBatch, blocks: OpenBlocks, rank_QW: Float, num_filled_N: Int) -> None:
    """Up to k lookaheads of every request, each the anchor plus one more of its remaining masks; then the anchor.
    Behind `settle`. num_filled_N: by the fill rule in this step."""
    candidates_N, rank_QW = _candidates(batch, blocks, rank_QW)
    num_spawned_N = np.minimum(_most(batch, num_filled_N, candidates_N), candidates_N)
    most = max(num_spawned_N.tolist())
    if most:
        order_NK = _lowest(_padded(blocks, rank_QW), most)
        np.add(batch.next_N[:, None], order_NK, out=batch.branch_2NB[0, :, :most])
        order_NK += blocks.begin_N[:, None]
        values_3NK = blocks.values_3QW.reshape(3, -1).take(order_NK, axis=1, mode="clip")
        with np.errstate(invalid="ignore"):  # behind a request's last lookahead stands anything
            batch.branch_2NB[1, :, :most] = values_3NK[0]
        batch.confidence_NB[:, :most] = values_3NK[2]
    np.add(num_spawned_N, ONE, out=batch.num_branches_N)


def _candidates(batch: RequestBatch, blocks: OpenBlocks, rank_QW: Float) -> tuple[Int, Float]:
    """How many masks of each request may be tried, and the rank of each position: the lowest are tried first, infinity
    is never."""
    kind, request_Q = batch.kind, blocks.request_Q
    is_default = kind.spawn_rule == "confident" and kind.spawn_blocks != "first"
    if is_default and kind.strategy != "fast_dllm":
        return batch.num_masked_N, rank_QW
    is_masked_QW = batch.tokens.is_masked_S.take(blocks.place_QW)
    if kind.spawn_blocks == "first":
        is_masked_QW &= (blocks.block_Q == (batch.before_N + batch.first_open_N)[request_Q])[:, None]
    candidates_N = batch.num_masked_N
    if kind.spawn_blocks == "first" or kind.strategy == "fast_dllm":
        num_masked_Q = np.add.reduce(is_masked_QW, axis=1, dtype=np.int64)
        candidates_N = np.bincount(request_Q, num_masked_Q, minlength=len(batch)).astype(np.int64)
    if kind.spawn_rule != "confident":
        return candidates_N, _own_ranks(batch, blocks, is_masked_QW, candidates_N)
    np.putmask(rank_QW, ~is_masked_QW, np.inf)
    return candidates_N, rank_QW


def _padded(blocks: OpenBlocks, rank_QW: Float) -> Float:
    """[N, C]: a request a row."""
    num_requests, size = len(blocks.count_N), rank_QW.shape[1]
    padded_PW = np.empty((num_requests * blocks.widest, size), dtype=rank_QW.dtype)
    padded_PW.fill(np.inf)
    padded_PW[blocks.padded_Q] = rank_QW
    return padded_PW.reshape(num_requests, -1)


def _own_ranks(batch: RequestBatch, blocks: OpenBlocks, is_masked_QW: Bool, candidates_N: Int) -> Float:
    """By a rule that looks at one request's masks together."""
    rank, rank_QW = policy("spawn_rules", batch.kind.spawn_rule), np.full(is_masked_QW.shape, np.inf)
    width, values_3X = is_masked_QW.shape[1], blocks.values_3QW.reshape(3, -1)
    for place, first in enumerate((blocks.begin_N // width).tolist()):
        if candidates_N[place]:
            own = slice(first, first + int(blocks.count_N[place]))
            values_3W = values_3X[:, own.start * width : own.stop * width]
            column_C, start = is_masked_QW[own].ravel().nonzero()[0], int(batch.next_N[place])
            decoding, draws = batch.requests[place], Draws(*batch.key_of(place), stream=1)
            spawning = Spawning(values_3W, column_C, start, decoding.rules.decode, draws)
            found = np.full(len(values_3W[0]), np.inf)
            rank_C = decoding.asked(rank, spawning)
            found[column_C] = 0 if rank_C is None else -rank_C
            rank_QW[own] = found.reshape(-1, width)
    return rank_QW


def _most(batch: RequestBatch, num_filled_N: Int, candidates_N: Int) -> Int:
    """Lookaheads of each request's next step, by `lookahead_rule`."""
    if batch.kind.lookahead_rule == "all":
        return batch.num_lookahead_N
    count = policy("lookahead_rules", batch.kind.lookahead_rule)
    stepped = zip(num_filled_N.tolist(), candidates_N.tolist(), batch.requests, strict=True)
    found = [
        request.asked(count, Stepped(filled, masked, request.rules.decode)) or 0 for filled, masked, request in stepped
    ]
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
