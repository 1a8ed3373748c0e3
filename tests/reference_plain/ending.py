"""When a request has ended, and what it ends with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.decoding.plan import Bool, Int
from common.decoding.request import Completion, FinishReason
from reference_plain.rules import Rules
from reference_plain.state_shared import DecodingRequest


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
    num_kept, own_reason = _find_end(decoding, generated[:num_filled_prefix], canvas.has_eos, spent, reason)
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
    decoding: DecodingRequest, prefix: Int, has_eos: bool, spent: FinishReason | None, reason: FinishReason | None
) -> tuple[int, FinishReason | None]:
    """How much of the filled prefix is the answer, and why the request ends, if it does by itself."""
    rules = decoding.rules
    end_at = _ends_in(prefix, rules) if has_eos else prefix[:0]
    num_kept = int(end_at[0]) + 1 if end_at.size else len(prefix)
    has_stop_token = bool(end_at.size) and int(prefix[end_at[0]]) in rules.decode.stop_token_ids
    if rules.find_stop is not None:
        if decoding.stop_search is None:
            decoding.stop_search = decoding.asked(rules.find_stop)
        search, is_over = decoding.stop_search, bool(end_at.size) or spent is not None or reason is not None
        if search is not None:
            more_ids = prefix[search.num_seen : num_kept - has_stop_token].tolist()
            stop_at = decoding.asked(search.find, more_ids, is_over)
            if stop_at is not None:
                return stop_at, "stop"
    if end_at.size and (rules.decode.stop_at_eos or spent == "length"):
        return num_kept, "stop" if has_stop_token else "eos"
    return num_kept, spent


def _ends_in(prefix: Int, rules: Rules) -> Int:
    """Places of end tokens."""
    if rules.end_token_ids == {rules.eos_token_id}:
        is_end = prefix == rules.eos_token_id  # faster
    else:
        is_end = np.isin(prefix, list(rules.end_token_ids))
    found: Int = is_end.nonzero()[0]
    return found
