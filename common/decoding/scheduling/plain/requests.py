"""Requests decoded one after another in each step: the specification, and the faster way while there are few.

One step of one request: open and activate blocks per branch, plan the window (`planning`) -> [forward] -> score the
branches -> [commit the winner] -> fill it, spawn lookaheads from it (`filling`) -> end it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.decoding.plan import Int, Predictions, Sampling, Score, StepPlan
from common.decoding.request import Completion, FinishReason
from common.decoding.scheduling.confidence import BRANCH_SCORES
from common.decoding.scheduling.ending import completion_of
from common.decoding.scheduling.plain.blocks import BlockStatus, block_strategy
from common.decoding.scheduling.plain.filling import adopt, fill, random_of, spawn
from common.decoding.scheduling.plain.layout import align, lay_out
from common.decoding.scheduling.plain.planning import plan_request
from common.decoding.scheduling.plain.state import Aligned, PlainRequest, RequestStep
from common.decoding.scheduling.state import Admission, DecodingRequest, StepRecord


class PlainRequests:
    """`state.Requests`, one after another.

    observer: sees a StepRecord of every request and step.
    """

    def __init__(self, mask_token_id: int, observer: Callable[[StepRecord], None] | None) -> None:
        self._mask_token_id = mask_token_id
        self.observer = observer
        self._requests: list[PlainRequest] = []
        self._steps: list[RequestStep] = []
        self._aligned: list[Aligned] = []
        self._scores: list[Score] = []

    @property
    def active(self) -> list[DecodingRequest]:
        return [*self._requests]

    def add(self, admission: Admission) -> None:
        prompt, decode = admission.request.prompt, admission.rules.decode
        capacity, strategy = len(prompt) + decode.max_new_tokens, block_strategy(decode)
        token_S = np.full(capacity, self._mask_token_id, dtype=np.int64)
        token_S[: len(prompt)] = prompt
        self._requests.append(
            PlainRequest(
                **vars(admission),
                strategy=strategy,
                token_S=token_S,
                is_masked_S=np.arange(capacity) >= len(prompt),
                blocks=strategy.initial_blocks(len(prompt), admission.num_reused),
            )
        )

    def drop(self, request_id: str, now: float) -> tuple[DecodingRequest, Completion] | None:
        decoding = next((decoding for decoding in self._requests if decoding.request.id == request_id), None)
        if decoding is None:
            return None
        self._requests.remove(decoding)
        completion = completion_of(decoding, decoding.canvas, now, spent=None, reason="abort")
        assert completion is not None, "it ends in any case"
        return decoding, completion

    def num_lookaheads(self) -> Int:
        return np.array([len(decoding.branches) - 1 for decoding in self._requests], dtype=np.int64)

    def keep_lookaheads(self, count_N: Int) -> None:
        for decoding, count in zip(self._requests, count_N.tolist(), strict=True):
            del decoding.branches[count:-1]

    def plan_step(self, sampling: Sampling) -> StepPlan:
        self._steps, first_row = [], 0
        for decoding in self._requests:
            step = plan_request(decoding, first_row)
            self._steps.append(step)
            first_row = step.end_row
        return lay_out(self._steps, sampling)

    def select_winners(self, predictions: Predictions) -> Int:
        self._aligned = align(self._steps, predictions)
        self._scores = [self._score(step, aligned) for step, aligned in zip(self._steps, self._aligned, strict=True)]
        winners = [step.first_row + int(score.argmax()) for step, score in zip(self._steps, self._scores, strict=True)]
        return np.array(winners, dtype=np.int64)

    def scores(self) -> Score:
        return np.concatenate(self._scores)

    def advance(self, winner_row_of_request: Int, now: float) -> list[tuple[DecodingRequest, Completion]]:
        finished: list[tuple[DecodingRequest, Completion]] = []
        for index, step in enumerate(self._steps):
            winner = int(winner_row_of_request[index]) - step.first_row
            self._advance_request(step, self._aligned[index], self._scores[index], winner, now)
            completion = _ended(step.decoding, now)
            if completion is not None:
                finished.append((step.decoding, completion))
                self._requests.remove(step.decoding)
        return finished

    def newly_final(self) -> list[tuple[str, tuple[int, ...]]]:
        found = [(decoding, decoding.final_tokens()) for decoding in self._requests]
        for decoding, token_ids in found:
            decoding.num_given += len(token_ids)
        return [(decoding.request.id, token_ids) for decoding, token_ids in found if token_ids]

    def _score(self, step: RequestStep, aligned: Aligned) -> Score:
        decoding = step.decoding
        decode, rng = decoding.rules.decode, random_of(decoding, stream=0)
        score_B = BRANCH_SCORES[decode.branch_score](aligned.confidence_BW, step.is_masked_BW, decoding.rules.kind, rng)
        if decode.creation_weight == 0:
            return score_B
        created_B = np.array([branch.creation_confidence for branch in decoding.branches])
        return decode.creation_weight * created_B + (1 - decode.creation_weight) * score_B

    def _advance_request(self, step: RequestStep, aligned: Aligned, score_B: Score, winner: int, now: float) -> None:
        decoding = step.decoding
        is_anchor = decoding.branches[winner].position is None
        adopt(decoding, decoding.branches[winner])
        strategy = decoding.strategy
        fillable = strategy.fillable(decoding.blocks)
        position_N, token_N = fill(step, aligned, winner, fillable)
        if step.window.commit_length and decoding.rules.decode.shift_row == "stale":
            column = step.window.next_start - step.window.start
            decoding.carry_31 = aligned.values_3BW[:, winner, column : column + 1].copy()
        decoding.is_refreshed = not strategy.settle(decoding.blocks)
        decoding.branches = spawn(step, aligned, winner, fillable)
        decoding.num_forwards += 1
        decoding.num_lookahead_wins += not is_anchor
        decoding.tokens_per_step.append(len(position_N) + (not is_anchor))
        if decoding.num_forwards == 1:
            decoding.first_step_s = now - decoding.admitted_at
        if self.observer is not None:
            filled = dict(zip(position_N.tolist(), token_N.tolist(), strict=True))
            confidence_N = aligned.confidence_BW[winner].take(position_N - step.window.start)
            self.observer(_record(step, score_B, is_anchor, filled, confidence_N.tolist()))


def _ended(decoding: PlainRequest, now: float) -> Completion | None:
    """The finished request, or None while it goes on."""
    spent: FinishReason | None = None
    if _is_done(decoding):
        spent = "length"
    elif decoding.num_forwards >= decoding.rules.max_steps:
        spent = "max_steps"
    if spent is None and not decoding.has_eos and decoding.rules.find_stop is None:
        return None
    return completion_of(decoding, decoding.canvas, now, spent=spent)


def _is_done(decoding: PlainRequest) -> bool:
    """No mask left, no block active, and none to open."""
    if any(block.num_masked or block.status is BlockStatus.ACTIVE for block in decoding.blocks):
        return False
    return decoding.has_eos or not decoding.strategy.opens_block(decoding.blocks, last_filled_share=1.0)


def _record(
    step: RequestStep, score_B: Score, is_anchor: bool, filled: dict[int, int], filled_confidence: list[float]
) -> StepRecord:
    decoding = step.decoding
    return StepRecord(
        request_id=decoding.request.id,
        start=step.window.start,
        commit_length=step.window.commit_length,
        window_lengths=[end - step.window.start for end in step.ends],
        branch_scores=score_B.tolist(),
        winner_is_anchor=is_anchor,
        filled=filled,
        filled_confidence=filled_confidence,
        lookahead=[
            (branch.position, branch.token, branch.creation_confidence)
            for branch in decoding.branches
            if branch.position is not None
        ],
    )
