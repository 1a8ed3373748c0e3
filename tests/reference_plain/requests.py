"""Requests decoded one after another in each step: the specification, and the faster way while there are few.

One step of one request: open and activate blocks per branch, plan the window (`planning`) -> [forward] -> score the
branches -> [commit the winner] -> fill it, spawn lookaheads from it (`filling`) -> end it.
"""

from __future__ import annotations

import numpy as np

from common.decoding.engine import Room
from common.decoding.plan import Int, Predictions, Sampling, Score, StepPlan
from common.decoding.request import Completion, FinishReason
from reference_plain.blocks import prompt_part
from reference_plain.ending import completion_of
from reference_plain.filling import adopt, draws_of, fill, seed_next_block, spawn
from reference_plain.layout import align, lay_out, masks_of, unaligned
from reference_plain.planning import plan_request
from reference_plain.policies import policy
from reference_plain.policies.inputs import Scoring
from reference_plain.records import candidates_of, record_of
from reference_plain.state import ANCHOR, Aligned, PlainRequest, RequestStep
from reference_plain.state_shared import Admission, DecodingRequest, Observer
from reference_plain.strategies import block_strategy


class PlainRequests:
    """`state.Requests`, one after another."""

    def __init__(self, mask_token_id: int, observer: Observer | None) -> None:
        self._mask_token_id = mask_token_id
        self.observer = observer
        self._requests: list[PlainRequest] = []
        self._steps: list[RequestStep] = []
        self._scorings: list[Scoring] = []
        self._aligned: list[Aligned] = []
        self._scores: list[Score] = []

    @property
    def active(self) -> list[DecodingRequest]:
        return [*self._requests]

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, admission: Admission) -> None:
        self._requests.append(begun(admission, self._mask_token_id))

    def take(self, requests: list[PlainRequest]) -> None:
        """Go on with these, between two steps."""
        self._requests += requests

    def give(self) -> list[PlainRequest]:
        """Let go of all requests, between two steps."""
        given, self._requests = self._requests, []
        return given

    def drop(self, request_id: str, now: float) -> tuple[DecodingRequest, Completion] | None:
        decoding = next((decoding for decoding in self._requests if decoding.request.id == request_id), None)
        if decoding is None:
            return None
        self._requests.remove(decoding)
        completion = completion_of(decoding, decoding.canvas, now, spent=None, reason="abort")
        assert completion is not None, "it ends in any case"
        return decoding, completion

    def num_prompt_tokens(self) -> int:
        begun = (decoding for decoding in self._requests if decoding.num_forwards)
        chunks = (prompt_part(decoding.blocks, decoding.prompt_length) for decoding in begun)
        return sum(chunk.end - chunk.start for chunk in chunks if chunk is not None)

    def plan_step(self, sampling: Sampling) -> StepPlan:
        self._steps, self._scorings, first_row = [], [], 0
        for decoding in self._requests:
            step = plan_request(decoding, first_row)
            self._steps.append(step)
            first_row = step.end_row
        return lay_out(self._steps, sampling)

    def prepare(self) -> None:
        self._scorings = [_scoring_of(step) for step in self._steps]

    def select_winners(self, predictions: Predictions) -> Int:
        if not self._scorings:
            self.prepare()
        self._aligned, self._scores, winners, first = [], [], [], 0
        for step, scoring in zip(self._steps, self._scorings, strict=True):
            end = first + step.spans.num_entries
            self._aligned.append(align(step, predictions.values_3T[:, first:end], scoring.values_3BW))
            score_B = _score(step, scoring)
            self._scores.append(score_B)
            winners.append(step.first_row + int(score_B.argmax()))
            first = end
        return np.array(winners, dtype=np.int64)

    def scores(self) -> Score:
        return np.concatenate(self._scores)

    def advance(self, winner_row_of_request: Int, now: float) -> list[tuple[DecodingRequest, Completion]]:
        finished: list[tuple[DecodingRequest, Completion]] = []
        for index, step in enumerate(self._steps):
            winner = int(winner_row_of_request[index]) - step.first_row
            self._advance_request(step, self._scorings[index], self._aligned[index], self._scores[index], winner, now)
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

    def _advance_request(
        self, step: RequestStep, scoring: Scoring, aligned: Aligned, score_B: Score, winner: int, now: float
    ) -> None:
        decoding = step.decoding
        observer = self.observer if self.observer is not None and self.observer.wants(decoding) else None
        is_anchor = winner == len(decoding.branches.positions)  # it comes last
        adopt(step, winner)
        strategy = decoding.strategy
        fillable = strategy.fillable(decoding.blocks, decoding.is_refreshed)
        if fillable and fillable[-1].end > step.window.end:  # the lookahead's token was the window's last mask
            fillable = []
        candidates = {} if observer is None else candidates_of(step, aligned, winner, fillable)
        filled = fill(step, aligned, winner, fillable)
        num_filled = len(filled.token_N)
        if step.reads_carry:
            column = step.window.next_start - step.window.start
            decoding.carry_31 = aligned.values_3BW[:, winner, column : column + 1].copy()
        seed = seed_next_block(step, aligned, winner) if step.window.predicts_next else None
        decoding.is_refreshed = not strategy.settle(decoding.blocks, bool(num_filled or filled.edited))
        if decoding.rules.decode.max_block_steps is not None:  # masks may be left where the next step fills none
            fillable = strategy.fillable(decoding.blocks, True) if decoding.is_refreshed else []
        decoding.branches = spawn(step, aligned, winner, fillable, num_filled)
        decoding.num_forwards += 1
        decoding.num_lookahead_wins += not is_anchor
        num_tokens = num_filled + (not is_anchor) + (seed is not None)
        winner_place = 0 if is_anchor else winner + 1
        decoding.steps.append((num_tokens, len(step.widths), winner_place, step.widths[winner]))
        if decoding.num_forwards == 1:
            decoding.first_step_s = now - decoding.admitted_at
        if observer is not None:
            observer.see(record_of(step, scoring, aligned, winner, score_B, filled, seed, candidates))


def _scoring_of(step: RequestStep) -> Scoring:
    """What the branches are scored by, before there are predictions to put into it."""
    decoding, is_masked_BW = step.decoding, masks_of(step)
    num_masked_B: Int = np.add.reduce(is_masked_BW, axis=1, dtype=np.int64)
    decode, draws = decoding.rules.decode, draws_of(decoding, stream=0)
    start, branches = step.window.start, decoding.branches
    return Scoring(unaligned(step), is_masked_BW, branches, start, decode, draws, num_masked_B)


def _score(step: RequestStep, scoring: Scoring) -> Score:
    """C(B)."""
    decode, branches = step.decoding.rules.decode, step.decoding.branches
    score = policy("branch_scores", decode.branch_score)
    found_B = step.decoding.asked(score, scoring)
    score_B: Score = np.zeros(len(branches)) if found_B is None else found_B
    if decode.creation_weight == 0:
        return score_B
    created_B = np.array([*branches.confidences, ANCHOR.creation_confidence])
    return decode.creation_weight * created_B + (1 - decode.creation_weight) * score_B


def begun(admission: Admission, mask_token_id: int) -> PlainRequest:
    """A request before its first step."""
    prompt = admission.request.prompt
    num_positions = Room(len(prompt), admission.rules.decode).num_positions
    is_masked_S = np.arange(num_positions) >= len(prompt)
    strategy = block_strategy(admission.rules, len(prompt), is_masked_S)
    token_S = np.full(num_positions, mask_token_id, dtype=np.int64)
    token_S[: len(prompt)] = prompt
    return PlainRequest(
        **vars(admission),
        strategy=strategy,
        token_S=token_S,
        is_masked_S=is_masked_S,
        blocks=strategy.initial_blocks(admission.num_reused),
    )


def _ended(decoding: PlainRequest, now: float) -> Completion | None:
    """The finished request, or None while it goes on."""
    spent: FinishReason | None = None
    if decoding.strategy.is_done(decoding.blocks, decoding.has_eos):
        spent = "length"
    elif decoding.num_forwards >= decoding.rules.max_steps + _num_chunks(decoding):
        spent = "max_steps"
    if spent is None and not decoding.has_eos and decoding.rules.find_stop is None:
        return None
    return completion_of(decoding, decoding.canvas, now, spent=spent)


def _num_chunks(decoding: PlainRequest) -> int:
    """Passes that only read the prompt."""
    return 0 if decoding.rules.chunk is None else decoding.prompt_length // decoding.rules.chunk
