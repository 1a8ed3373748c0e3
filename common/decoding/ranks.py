"""Which rows of a plan each branch-parallel rank computes, and where the predictions of all of them belong.

Shapes: R rows, T tokens of the plan; P ranks, M reads of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from common.decoding.plan import Float, Int, Predictions, StepPlan


@cache
def _columns(num_values: int) -> Int:
    return _shared(np.arange(num_values)[:, None])


def rows_by_rank(plan: StepPlan, num_ranks: int) -> Sequence[Int]:
    """Return the plan's rows that each branch-parallel rank computes, ascending, none twice.

    Rows are dealt round robin, so that a request's branches spread over the ranks. Under block-causal attention each
    rank writes a committed block's KV itself, without traffic, so it also gets at least one row of every committing
    request: the anchor if no other. A rank for which nothing is left computes the first.
    """
    return _with_anchors(plan, num_ranks) if _lacks_rows(plan, num_ranks) else _round_robin(plan.num_rows, num_ranks)


def assign_rows(plan: StepPlan, num_ranks: int) -> Int:
    """Return `rows_by_rank` as an array [rank, place]: ranks with fewer rows repeat their last one."""
    if _lacks_rows(plan, num_ranks):
        return _equally_long(_with_anchors(plan, num_ranks))
    return _equal_round_robin(plan.num_rows, num_ranks)


def _lacks_rows(plan: StepPlan, num_ranks: int) -> bool:
    """Return whether some rank would get no row of a request whose KV it has to write."""
    if num_ranks == 1 or not plan.commits or not plan.commits_locally:
        return False
    # Rows of one request are adjacent (guidance, which doubles them, has one branch rank): as many as there are ranks
    # reach all of these.
    count_N = np.bincount(plan.request_R)
    return any(count_N[span.request] < num_ranks for span in plan.commits)


@cache
def _round_robin(num_rows: int, num_ranks: int) -> tuple[Int, ...]:
    return tuple(_shared(np.arange(rank if rank < num_rows else 0, num_rows, num_ranks)) for rank in range(num_ranks))


@cache
def _equal_round_robin(num_rows: int, num_ranks: int) -> Int:
    return _shared(_equally_long(_round_robin(num_rows, num_ranks)))


def _with_anchors(plan: StepPlan, num_ranks: int) -> list[Int]:
    request_R = plan.request_R.tolist()
    committing = {span.request for span in plan.commits}
    anchor_of = {request: row for row, request in enumerate(request_R) if request in committing}
    found = []
    for rank in range(num_ranks):
        held = set(request_R[rank::num_ranks])
        anchors = [anchor for request, anchor in anchor_of.items() if request not in held]
        found.append(np.array(sorted([*range(rank, len(request_R), num_ranks), *anchors]), dtype=np.int64))
    return found


def _equally_long(rows_of: Sequence[Int]) -> Int:
    most = max(map(len, rows_of))
    return np.stack([np.concatenate((rows, rows[-1:].repeat(most - len(rows)))) for rows in rows_of])


def _shared(values_R: Int) -> Int:
    """Make the array read-only, since all steps of this many rows share it."""
    values_R.flags.writeable = False
    return values_R


class PredictionOrder:
    """Puts the predictions of all branch-parallel ranks into the plan's order.

    num_tokens: of the plan. entries_of: the plan's entries that each rank has read, in its order. num_reads:
    predictions of a rank, padding included. num_values: numbers of each.
    """

    def __init__(self, num_tokens: int, entries_of: Sequence[Int], num_reads: int, num_values: int = 3) -> None:
        source_T = np.zeros(num_tokens, dtype=np.int64)  # whatever stands first, where nothing is read
        # An entry read on several ranks counts once, from the first: of equal targets the last one written stays.
        for rank in reversed(range(len(entries_of))):
            entry_M = entries_of[rank]
            source_T[entry_M] = np.arange(rank * num_reads, rank * num_reads + len(entry_M))
        self._source_3T = num_values * source_T + _columns(num_values)

    def predictions(self, predicted_PM3: Float) -> Predictions:
        """Return the predictions in the plan's order. predicted_PM3: token, probability, confidence of each rank's
        reads."""
        return Predictions(predicted_PM3.reshape(-1).take(self._source_3T))
