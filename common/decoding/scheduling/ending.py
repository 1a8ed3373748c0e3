"""When a request has ended, and what it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.decoding.plan import Bool, Int
from common.decoding.request import Completion, FinishReason
from common.decoding.scheduling.rules import Rules
from common.decoding.scheduling.state import DecodingRequest


class Canvas(NamedTuple):
    """What a request has come to: its opened positions, and how it came there.

    num_final: positions in front of which an end counts already; None: any.
    """

    token_C: Int
    is_masked_C: Bool
    has_eos: bool
    num_forwards: int
    num_lookahead_wins: int
    num_final: int | None = None


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
    if canvas.num_final is not None and spent is None and reason is None:
        num_filled_prefix = min(num_filled_prefix, canvas.num_final)
    num_kept, own_reason = _find_end(decoding, generated[:num_filled_prefix], canvas.has_eos, spent)
    reason = own_reason or reason
    if reason is None:
        return None
    tokens, rows, winners, windows = zip(*decoding.steps, strict=True) if decoding.steps else ((),) * 4
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
        tokens_per_step=tokens,
        winner_per_step=winners,
        window_per_step=windows,
        num_forced_fills=decoding.num_forced_fills,
        num_rows=sum(rows),
    )


def _find_end(
    decoding: DecodingRequest, prefix: Int, has_eos: bool, spent: FinishReason | None
) -> tuple[int, FinishReason | None]:
    """How much of the filled prefix is the answer, and why the request ends, if it does."""
    rules = decoding.rules
    eos_at = _ends_in(prefix, rules) if has_eos else prefix[:0]
    num_kept = int(eos_at[0]) + 1 if eos_at.size else len(prefix)
    if rules.find_stop is not None:
        stop_at = decoding.asked(rules.find_stop, prefix[:num_kept].tolist(), decoding.num_searched)
        if stop_at is not None:
            return stop_at, "stop"
        decoding.num_searched = num_kept  # what is filled stays as it is
    if eos_at.size and (rules.decode.stop_at_eos or spent == "length"):
        return num_kept, "eos"
    return num_kept, spent


def _ends_in(prefix: Int, rules: Rules) -> Int:
    """Places of end tokens."""
    is_end = prefix == rules.eos_token_id
    if len(rules.end_token_ids) > 1:
        is_end = np.isin(prefix, list(rules.end_token_ids))
    found: Int = is_end.nonzero()[0]
    return found
