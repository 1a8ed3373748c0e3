"""A step as records, one a request, for traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.decoding.plan import Bool, Score
from common.decoding.scheduling.arrays.filling import OpenBlocks
from common.decoding.scheduling.arrays.rows import Rows
from common.decoding.scheduling.state import Observer, StepRecord


def records_of(
    rows: Rows, start_N: Sequence[int], score_R: Score, is_lookahead_N: Bool, blocks: OpenBlocks, is_chosen_QW: Bool,
    observer: Observer,
) -> Iterator[StepRecord]:  # fmt: skip
    """Of a step whose lookaheads have been spawned, those that the observer wants. Window lengths and scores are the
    step's, lookaheads the next's."""
    batch = rows.batch
    bounds = [*rows.branches.first_row_N.tolist(), len(rows.request_R)]
    for place, decoding in enumerate(batch.requests):
        if not observer.wants(decoding):
            continue
        own, blocks_of_own = slice(*bounds[place : place + 2]), blocks.request_Q == place
        is_chosen_QW_own = is_chosen_QW[blocks_of_own]
        position_S = blocks.place_QW[blocks_of_own][is_chosen_QW_own] - decoding.slot * batch.tokens.stride
        token_S = blocks.values_3QW[0, blocks_of_own][is_chosen_QW_own]
        confidence_S = blocks.values_3QW[2, blocks_of_own][is_chosen_QW_own]
        spawned = slice(0, int(batch.num_branches_N[place]) - 1)
        yield StepRecord(
            request_id=decoding.request.id,
            start=start_N[place],
            commit_length=int(batch.commit_N[place]),
            window_lengths=rows.num_keys_R[own].tolist(),
            branch_scores=score_R[own].tolist(),
            winner_is_anchor=not is_lookahead_N[place],
            filled=dict(zip(position_S.tolist(), token_S.astype(int).tolist(), strict=True)),
            filled_confidence=confidence_S.tolist(),
            lookahead=list(
                zip(
                    batch.branch_2NB[0, place, spawned].tolist(),
                    batch.branch_2NB[1, place, spawned].tolist(),
                    batch.confidence_NB[place, spawned].tolist(),
                    strict=True,
                )
            ),
        )
