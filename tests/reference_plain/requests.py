"""Requests decoded one after another in each step: the specification.

One step of one request: open and activate blocks per branch, plan the window (`layout`) -> [forward] -> score the
branches -> [commit the winner] -> fill it, spawn lookaheads from it (`filling`) -> end it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.decoding.engine import Room
from common.decoding.plan import Int, Predictions, Sampling, Score, StepPlan
from common.decoding.request import Completion, FinishReason
from common.decoding.scheduling.state import Candidate, DecodingRequest, Observer, StepRecord
from common.policies import Scoring
from reference_plain.blocks import Block, prompt_part
from reference_plain.filling import adopt, draws_of, fill, seed_next_block, spawn
from reference_plain.layout import align, lay_out, masks_of, plan_request
from reference_plain.policies import policy
from reference_plain.state import Aligned, PlainRequest, RequestStep
from reference_plain.strategies import block_strategy


class _Scored(NamedTuple):
    step: RequestStep
    scoring: Scoring
    aligned: Aligned
    score_B: Score


class PlainRequests:
    """What `scheduling.requests.Requests` is, one after another."""

    def __init__(self, mask_token_id: int) -> None:
        self._mask_token_id = mask_token_id
        self.observer: Observer | None = None
        self.active: list[PlainRequest] = []
        self._steps: list[RequestStep] = []
        self._scored: list[_Scored] = []

    def add(self, admission: DecodingRequest) -> None:
        """Begin a request. admission: its `rules` are the oracle's."""
        prompt, rules = admission.request.prompt, admission.rules
        num_positions = Room(len(prompt), rules.decode).num_positions
        is_masked_S = np.arange(num_positions) >= len(prompt)
        token_S = np.full(num_positions, self._mask_token_id, dtype=np.int64)
        token_S[: len(prompt)] = prompt
        strategy = block_strategy(rules, len(prompt), is_masked_S)
        self.active.append(
            PlainRequest(
                request=admission.request,
                rules=rules,
                slot=admission.slot,
                noise_key=admission.noise_key,
                num_reused=admission.num_reused,
                admitted_at=admission.admitted_at,
                strategy=strategy,
                token_S=token_S,
                is_masked_S=is_masked_S,
                blocks=strategy.initial_blocks(admission.num_reused),
            )
        )

    def drop(self, request_id: str, now: float) -> tuple[PlainRequest, Completion] | None:
        decoding = next((decoding for decoding in self.active if decoding.request.id == request_id), None)
        if decoding is None:
            return None
        self.active.remove(decoding)
        return decoding, _completion(decoding, now, *_end_of(decoding, None, "abort"))

    def num_prompt_tokens(self) -> int:
        begun = (decoding for decoding in self.active if decoding.num_forwards)
        chunks = (prompt_part(decoding.blocks, decoding.prompt_length) for decoding in begun)
        return sum(chunk.end - chunk.start for chunk in chunks if chunk is not None)

    def plan_step(self, sampling: Sampling) -> StepPlan:
        self._steps, first_row = [], 0
        for decoding in self.active:
            self._steps.append(plan_request(decoding, first_row))
            first_row += len(decoding.branches)
        return lay_out(self._steps, sampling)

    def select_winners(self, predictions: Predictions) -> Int:
        self._scored, winners, first = [], [], 0
        for step in self._steps:
            end = first + sum(step.lengths)
            scored = _scored(step, align(step, predictions.values_3T[:, first:end]))
            self._scored.append(scored)
            winners.append(step.first_row + int(scored.score_B.argmax()))
            first = end
        return np.array(winners, dtype=np.int64)

    def scores(self) -> Score:
        return np.concatenate([scored.score_B for scored in self._scored])

    def advance(self, winner_row_of_request: Int, now: float) -> list[tuple[PlainRequest, Completion]]:
        finished: list[tuple[PlainRequest, Completion]] = []
        for scored, winner_row in zip(self._scored, winner_row_of_request.tolist(), strict=True):
            decoding = scored.step.decoding
            self._advance_request(scored, winner_row - scored.step.first_row, now)
            num_kept, reason = _end_of(decoding, _spent(decoding))
            if reason is not None:
                finished.append((decoding, _completion(decoding, now, num_kept, reason)))
                self.active.remove(decoding)
        return finished

    def newly_final(self) -> list[tuple[str, tuple[int, ...]]]:
        found = [(decoding, decoding.final_tokens()) for decoding in self.active]
        for decoding, token_ids in found:
            decoding.num_given += len(token_ids)
        return [(decoding.request.id, token_ids) for decoding, token_ids in found if token_ids]

    def _advance_request(self, scored: _Scored, winner: int, now: float) -> None:
        step, _, aligned, _ = scored
        decoding, strategy = step.decoding, step.decoding.strategy
        is_anchor = winner == len(decoding.branches) - 1
        adopt(step, winner)
        fillable = strategy.fillable(decoding.blocks, decoding.is_refreshed)
        if fillable and fillable[-1].end > step.window.end:  # the lookahead's token was the window's last mask
            fillable = []
        candidates = _candidates(step, aligned, winner, fillable)
        filled, edited = fill(step, aligned, winner, fillable)
        num_filled = len(filled)
        if step.reads_carry:
            decoding.carry_3 = aligned.values_3BW[:, winner, step.window.next_start - step.window.start].copy()
        if step.window.predicts_next:
            filled |= seed_next_block(step, aligned, winner)
        decoding.is_refreshed = not strategy.settle(decoding.blocks, bool(num_filled or edited))
        if decoding.rules.decode.max_block_steps is not None:  # masks may be left where the next step fills none
            fillable = strategy.fillable(decoding.blocks, True) if decoding.is_refreshed else []
        decoding.branches = spawn(step, aligned, winner, fillable, num_filled)
        decoding.num_forwards += 1
        decoding.num_lookahead_wins += not is_anchor
        num_tokens = len(filled) + (not is_anchor)
        decoding.steps.append((num_tokens, len(step.widths), 0 if is_anchor else winner + 1, step.widths[winner]))
        if decoding.num_forwards == 1:
            decoding.first_step_s = now - decoding.admitted_at
        if self.observer is not None and self.observer.wants(decoding):
            self.observer.see(_record(scored, is_anchor, filled, edited, candidates))


def _scored(step: RequestStep, aligned: Aligned) -> _Scored:
    """The branches of a step with C(B) of each."""
    decoding, decode = step.decoding, step.decoding.rules.decode
    draws = draws_of(decoding, stream=0)
    scoring = Scoring(aligned.values_3BW, masks_of(step), decoding.branches, step.window.start, decode, draws)
    score_B = policy("branch_scores", decode.branch_score)(scoring)
    if decode.creation_weight:
        created_B = np.array([branch.creation_confidence for branch in decoding.branches])
        score_B = decode.creation_weight * created_B + (1 - decode.creation_weight) * score_B
    return _Scored(step, scoring, aligned, score_B)


def _spent(decoding: PlainRequest) -> FinishReason | None:
    """Why nothing is left to do for it; None while something is."""
    if decoding.strategy.is_done(decoding.blocks, decoding.has_eos):
        return "length"
    chunk = decoding.rules.chunk
    num_chunks = 0 if chunk is None else decoding.prompt_length // chunk  # passes that only read the prompt
    return "max_steps" if decoding.num_forwards >= decoding.rules.max_steps + num_chunks else None


def _end_of(
    decoding: PlainRequest, spent: FinishReason | None, reason: FinishReason | None = None
) -> tuple[int, FinishReason | None]:
    """How much of the filled prefix is the answer, and why the request ends; None while it goes on. reason: why it ends
    if not by itself."""
    rules, begin = decoding.rules, decoding.prompt_length
    is_masked = decoding.is_masked_S[begin : decoding.end]
    num_filled = int(is_masked.argmax()) if is_masked.any() else len(is_masked)
    final_end = decoding.strategy.final_end(decoding.blocks)
    if final_end is not None and spent is None and reason is None:
        num_filled = min(num_filled, max(0, final_end - begin))
    prefix = decoding.token_S[begin : begin + num_filled].tolist()
    end = next((place for place, token in enumerate(prefix) if token in rules.end_token_ids), None)
    if end is None:
        return num_filled, spent or reason
    if rules.decode.stop_at_eos or spent == "length":
        return end + 1, "stop" if prefix[end] in rules.decode.stop_token_ids else "eos"
    return end + 1, spent or reason


def _completion(decoding: PlainRequest, now: float, num_kept: int, reason: FinishReason) -> Completion:
    canvas = slice(decoding.prompt_length, decoding.end)
    tokens, rows, winners, windows = zip(*decoding.steps, strict=True) if decoding.steps else ((),) * 4
    canvas_ids = tuple(decoding.token_S[canvas].tolist())
    return Completion(
        id=decoding.request.id,
        prompt_length=decoding.prompt_length,
        token_ids=canvas_ids[:num_kept],
        canvas_token_ids=canvas_ids,
        num_canvas_tokens=int((~decoding.is_masked_S[canvas]).sum()),
        num_forwards=decoding.num_forwards,
        num_lookahead_wins=decoding.num_lookahead_wins,
        finish_reason=reason,
        first_step_s=decoding.first_step_s,
        total_s=now - decoding.admitted_at,
        tokens_per_step=tokens,
        winner_per_step=winners,
        window_per_step=windows,
        num_forced_fills=decoding.num_forced_fills,
        num_rows=sum(rows),
    )


def _candidates(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> dict[int, Candidate]:
    """What the winner predicts at each mask that the step may fill and, where it may edit, at each filled position.
    Before the step fills any."""
    decoding, found = step.decoding, {}
    for block in fillable:
        for position in range(max(block.start, decoding.prompt_length), block.end):
            is_masked = decoding.is_masked_S[position]
            if is_masked or decoding.rules.decode.edit_threshold is not None:
                token, *both = aligned.values_3BW[:, winner, position - step.window.start].tolist()
                found[position] = Candidate(int(token), *both, None if is_masked else int(decoding.token_S[position]))
    if aligned.next_3B is not None:
        token, *both = aligned.next_3B[:, winner].tolist()
        found[step.window.end] = Candidate(int(token), *both)
    return found


def _record(
    scored: _Scored, is_anchor: bool, filled: dict[int, int], edited: dict[int, int], candidates: dict[int, Candidate]
) -> StepRecord:
    """Record a step after its lookaheads: window lengths and scores are its own, lookaheads the next step's."""
    step, scoring, _, score_B = scored
    is_sure_BW = (scoring.probability_BW > step.decoding.rules.decode.skip_threshold) & scoring.is_masked_BW
    return StepRecord(
        request_id=step.decoding.request.id,
        start=step.window.start,
        commit_length=step.window.commit_length,
        window_lengths=[*step.widths],
        branch_scores=score_B.tolist(),
        winner_is_anchor=is_anchor,
        filled=filled,
        filled_confidence=[candidates[position].confidence for position in filled],
        lookahead=step.decoding.branches[:-1],
        candidates=candidates,
        num_sure=is_sure_BW.sum(axis=1).tolist(),
        edited=edited,
        is_tentative=step.window.is_tentative,
    )
