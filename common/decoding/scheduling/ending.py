"""When a request has ended, and what it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.decoding.plan import Bool, Int
from common.decoding.request import Completion, FinishReason
from common.decoding.scheduling.state import DecodingRequest


class Canvas(NamedTuple):
    """What a request has come to: its opened positions, and how it came there."""

    token_C: Int
    is_masked_C: Bool
    has_eos: bool
    num_forwards: int
    num_lookahead_wins: int


def without_stop(text: str, stops: Sequence[str]) -> str:
    """The text in front of the first of the stop strings."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def completion_of(
    decoding: DecodingRequest,
    canvas: Canvas,
    now: float,
    spent: FinishReason | None,
    reason: FinishReason | None = None,
) -> Completion | None:  # fmt: skip
    """What the request ends with, or None while it goes on.

    spent: why it ends, if there is nothing left to do for it. reason: why it ends in any case.
    """
    generated, is_masked = canvas.token_C, canvas.is_masked_C
    num_filled_prefix = int(is_masked.argmax()) if is_masked.any() else len(generated)
    num_kept, own_reason = _find_end(decoding, generated[:num_filled_prefix], canvas.has_eos, spent)
    reason = own_reason or reason
    if reason is None:
        return None
    return Completion(
        id=decoding.request.id,
        prompt_length=decoding.prompt_length,
        token_ids=tuple(generated[:num_kept].tolist()),
        canvas_token_ids=tuple(generated.tolist()),
        num_canvas_tokens=int((~is_masked).sum()),
        num_forwards=canvas.num_forwards,
        num_lookahead_wins=canvas.num_lookahead_wins,
        finish_reason=reason,
        first_step_s=decoding.first_step_s,
        total_s=now - decoding.admitted_at,
        tokens_per_step=tuple(decoding.tokens_per_step),
        num_forced_fills=decoding.num_forced_fills,
    )


def _find_end(
    decoding: DecodingRequest, prefix: Int, has_eos: bool, spent: FinishReason | None
) -> tuple[int, FinishReason | None]:
    """How much of the filled prefix is the answer, and why the request ends, if it does."""
    rules = decoding.rules
    eos_at = (prefix == rules.eos_token_id).nonzero()[0] if has_eos else prefix[:0]
    num_kept = int(eos_at[0]) + 1 if eos_at.size else len(prefix)
    if rules.find_stop is not None:
        stop_at = rules.find_stop(prefix[:num_kept].tolist(), decoding.num_searched)
        if stop_at is not None:
            return stop_at, "stop"
        decoding.num_searched = num_kept  # what is filled stays as it is
    if eos_at.size and (rules.decode.stop_at_eos or spent == "length"):
        return num_kept, "eos"
    return num_kept, spent
