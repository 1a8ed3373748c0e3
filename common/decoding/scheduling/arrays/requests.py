"""Requests decoded all at once in each step, as arrays: what `plain` decides, in the time of a few requests.

One step: windows and rows are planned (`rows`, `layout`) -> [forward] -> the branches are scored (`scores`) -> [commit
the winners] -> they are filled, lookaheads are spawned from them (`filling`) -> those that have ended go (`ending`).
Requests of one kind are one batch (`batch`): a step costs a few operations a batch, not a request.
"""

from __future__ import annotations

import numpy as np

from common.decoding.plan import Float, Int, Predictions, Sampling, Score, StepPlan
from common.decoding.request import Completion
from common.decoding.scheduling.arrays.batch import RequestBatch
from common.decoding.scheduling.arrays.ending import canvas_of, ended, newly_final
from common.decoding.scheduling.arrays.filling import (
    adopt,
    carry,
    fill,
    open_blocks,
    ranks_of,
    spawn,
    winners_of,
)
from common.decoding.scheduling.arrays.layout import Part, lay_out
from common.decoding.scheduling.arrays.moving import admission_of, put, to_plain
from common.decoding.scheduling.arrays.records import records_of
from common.decoding.scheduling.arrays.rows import NUM_KEYS, Rows, plan_rows
from common.decoding.scheduling.arrays.scores import best_rows, score_rows
from common.decoding.scheduling.arrays.strategies import STRATEGIES
from common.decoding.scheduling.arrays.tokens import TableRequest, TokenTable
from common.decoding.scheduling.ending import completion_of
from common.decoding.scheduling.plain import PlainRequest
from common.decoding.scheduling.rules import Kind
from common.decoding.scheduling.state import Admission, DecodingRequest, Observer


class RequestArrays:
    """`state.Requests`, all at once."""

    def __init__(self, num_slots: int, mask_token_id: int, observer: Observer | None) -> None:
        self._mask_token_id = mask_token_id
        self.observer = observer
        self._table = TokenTable(num_slots)
        self._batches: dict[Kind, RequestBatch] = {}
        self._added: dict[Kind, list[TableRequest]] = {}  # since the last step
        self._parts: list[Part] = []  # of the step under way
        self._scores: list[Score] = []
        self._predictions: Predictions | None = None

    @property
    def active(self) -> list[DecodingRequest]:
        self._take_in()
        return [decoding for batch in self._batches.values() for decoding in batch.requests]

    def add(self, admission: Admission) -> None:
        request, rules = admission.request, admission.rules
        capacity = len(request.prompt) + rules.decode.max_new_tokens
        if self._table.write(admission.slot, request.prompt, capacity, self._mask_token_id):
            for batch in self._batches.values():
                batch.offset_N[:] = batch.slot_N * self._table.stride
        self._added.setdefault(rules.kind, []).append(TableRequest(**vars(admission), table=self._table))

    def __len__(self) -> int:
        num_kept = sum(len(batch) - len(batch.over) for batch in self._batches.values())
        return num_kept + sum(map(len, self._added.values()))

    def take(self, requests: list[PlainRequest]) -> None:
        """Go on with these, between two steps."""
        for plain in requests:
            self.add(admission_of(plain))
        self._take_in()
        plain_of = {plain.slot: plain for plain in requests}
        for batch in self._batches.values():
            for place, decoding in enumerate(batch.requests):
                if decoding.slot in plain_of:
                    put(plain_of[decoding.slot], batch, place)

    def give(self) -> list[PlainRequest]:
        """Let go of all requests, between two steps."""
        self._take_in()
        given = [
            to_plain(batch, place, self._mask_token_id)
            for batch in self._batches.values()
            for place in range(len(batch))
        ]
        self._batches.clear()
        return given

    def drop(self, request_id: str, now: float) -> tuple[DecodingRequest, Completion] | None:
        self._take_in()
        for batch in self._batches.values():
            for place, decoding in enumerate(batch.requests):
                if decoding.request.id == request_id:
                    completion = completion_of(decoding, canvas_of(batch, place), now, spent=None, reason="abort")
                    assert completion is not None, "it ends in any case"
                    batch.over = [place]
                    return decoding, completion
        return None

    def num_lookaheads(self) -> Int:
        self._take_in()
        return np.concatenate([batch.num_branches_N for batch in self._batches.values()]) - 1

    def keep_lookaheads(self, count_N: Int) -> None:
        first = 0
        for batch in self._batches.values():
            batch.keep_lookaheads(count_N[first : first + len(batch)])
            first += len(batch)

    def num_prompt_tokens(self) -> int:
        return 0  # no strategy of these cuts prompts

    def plan_step(self, sampling: Sampling) -> StepPlan:
        self._take_in()
        plan, self._parts = lay_out([plan_rows(batch) for batch in self._batches.values()], sampling)
        return plan

    def prepare(self) -> None:
        """`plan_rows` has made it."""

    def select_winners(self, predictions: Predictions) -> Int:
        self._predictions, self._scores = predictions, []
        winners = []
        for part in self._parts:
            score_R = score_rows(part.rows, part.is_scored_T, predictions.values_3T[:, part.entries])
            winners.append(best_rows(part.rows, score_R) + part.first_row)
            self._scores.append(score_R)
        return winners[0] if len(winners) == 1 else np.concatenate(winners)

    def scores(self) -> Score:
        return np.concatenate(self._scores)

    def advance(self, winner_row_of_request: Int, now: float) -> list[tuple[DecodingRequest, Completion]]:
        assert self._predictions is not None, "advance follows select_winners"
        finished: list[tuple[DecodingRequest, Completion]] = []
        for part, score_R in zip(self._parts, self._scores, strict=True):
            batch, values_3T = part.rows.batch, self._predictions.values_3T[:, part.entries]
            winner_row_N = winner_row_of_request[part.requests] - part.first_row
            self._advance_batch(part.rows, values_3T, score_R, winner_row_N, now)
            over = ended(batch, now)
            finished += [(batch.requests[place], completion) for place, completion in over]
            batch.over = [place for place, _ in over]
        return finished

    def newly_final(self) -> list[tuple[str, tuple[int, ...]]]:
        self._take_in()
        return [
            (batch.requests[place].request.id, token_ids)
            for batch in self._batches.values()
            for place, token_ids in newly_final(batch)
        ]

    def _take_in(self) -> None:
        """Those that have been added and for them those that have ended, all at once: it costs as much as one."""
        if not self._added and not any(batch.over for batch in self._batches.values()):
            return
        for kind in self._added:  # in their order, which all ranks have
            if kind not in self._batches:
                self._batches[kind] = RequestBatch(kind, self._table)
        for kind, batch in [*self._batches.items()]:
            added = self._added.pop(kind, [])
            if added or batch.over:
                batch.renew(added)
            if not len(batch):
                del self._batches[kind]

    def _advance_batch(self, rows: Rows, values_3T: Float, score_R: Score, winner_row_N: Int, now: float) -> None:
        batch = rows.batch
        winner_FN = winners_of(rows, winner_row_N)
        is_lookahead_N = adopt(batch, winner_FN)
        blocks = open_blocks(rows, winner_row_N, winner_FN, values_3T)
        rank_QW = ranks_of(blocks)
        is_chosen_QW, num_filled_N = fill(batch, blocks, rank_QW)
        carry(batch, winner_FN, values_3T)
        start_N = batch.start_N.tolist() if self.observer is not None else []  # of this step, before it moves
        winner_N = (winner_row_N - rows.branches.first_row_N + 1) * is_lookahead_N
        steps = num_filled_N + is_lookahead_N, batch.num_branches_N, winner_N, winner_FN[NUM_KEYS]
        for decoding, step in zip(batch.requests, zip(*(one_N.tolist() for one_N in steps), strict=True), strict=True):
            decoding.steps.append(step)
        STRATEGIES[batch.kind.strategy].settle(batch)
        spawn(batch, blocks, rank_QW, num_filled_N)
        batch.num_forwards_N += 1
        batch.num_wins_N += is_lookahead_N
        if batch.has_begun:
            batch.has_begun = False
            for place in (batch.num_forwards_N == 1).nonzero()[0].tolist():
                batch.requests[place].first_step_s = now - batch.requests[place].admitted_at
        if self.observer is not None:
            for record in records_of(rows, start_N, score_R, is_lookahead_N, blocks, is_chosen_QW, self.observer):
                self.observer.see(record)
