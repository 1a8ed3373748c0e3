"""A step of one request as a record, for traces."""

from __future__ import annotations

from common.decoding.plan import Score
from reference_plain.blocks import Block
from reference_plain.filling import Filled
from reference_plain.policies.inputs import Scoring
from reference_plain.state import Aligned, RequestStep
from reference_plain.state_shared import Candidate, StepRecord


def candidates_of(step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> dict[int, Candidate]:
    """What the winner predicts at each mask that the step may fill and, where it may edit, at each filled position.
    Before the step fills any."""
    decoding, found = step.decoding, {}
    for block in fillable:
        for position in range(max(block.start, decoding.prompt_length), block.end):
            if decoding.is_masked_S[position] or decoding.rules.decode.edit_threshold is not None:
                token, probability, confidence = aligned.values_3BW[:, winner, position - step.window.start].tolist()
                current = None if decoding.is_masked_S[position] else int(decoding.token_S[position])
                found[position] = Candidate(int(token), probability, confidence, current)
    if aligned.next_3B is not None:
        token, probability, confidence = aligned.next_3B[:, winner].tolist()
        found[step.window.end] = Candidate(int(token), probability, confidence)
    return found


def record_of(
    step: RequestStep, scoring: Scoring, aligned: Aligned, winner: int, score_B: Score, filled: Filled,
    seed: tuple[int, int] | None, candidates: dict[int, Candidate],
) -> StepRecord:  # fmt: skip
    """Of a step whose lookaheads have been spawned. Window lengths and scores are the step's, lookaheads the next's."""
    decoding, position_N, branches = step.decoding, filled.place_N + filled.start, step.decoding.branches
    confidence_N = aligned.confidence_BW[winner].take(position_N - step.window.start)
    tokens = dict(zip(position_N.tolist(), filled.token_N.tolist(), strict=True))
    confidences = confidence_N.tolist()
    is_sure_BW = (aligned.probability_BW > decoding.rules.decode.skip_threshold) & scoring.is_masked_BW
    if seed is not None:
        tokens[seed[0]] = seed[1]
        confidences.append(candidates[seed[0]].confidence)
    return StepRecord(
        request_id=decoding.request.id,
        start=step.window.start,
        commit_length=step.window.commit_length,
        window_lengths=[*step.widths],
        branch_scores=score_B.tolist(),
        winner_is_anchor=winner == len(step.widths) - 1,
        filled=tokens,
        filled_confidence=confidences,
        lookahead=[*zip(branches.positions, branches.tokens, branches.confidences, strict=True)],
        candidates=candidates,
        num_sure=is_sure_BW.sum(axis=1).tolist(),
        edited=filled.edited,
        is_tentative=step.window.is_tentative,
    )
