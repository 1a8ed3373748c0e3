"""When a request has ended, and what it ends with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.decoding.plan import Int
from common.decoding.request import Completion, FinishReason
from common.decoding.scheduling.blocks import BlockStatus
from common.decoding.scheduling.state import DecodingRequest


def without_stop(text: str, stops: Sequence[str]) -> str:
    """The text in front of the first of the stop strings."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def completion_of(decoding: DecodingRequest, now: float, reason: FinishReason | None = None) -> Completion | None:
    """The finished request, or None while it goes on. reason: why it ends in any case."""
    may_end_early = decoding.has_eos or decoding.rules.find_stop is not None
    if not (reason or may_end_early or _is_done(decoding) or _is_out_of_steps(decoding)):
        return None
    generated = decoding.token_S[decoding.prompt_length : decoding.blocks[-1].end]
    is_masked = decoding.is_masked_S[decoding.prompt_length : decoding.blocks[-1].end]
    num_filled_prefix = int(is_masked.argmax()) if is_masked.any() else len(generated)
    num_kept, own_reason = _find_end(decoding, generated[:num_filled_prefix])
    reason = own_reason or reason
    if reason is None:
        return None
    return Completion(
        id=decoding.request.id,
        prompt_length=decoding.prompt_length,
        token_ids=tuple(generated[:num_kept].tolist()),
        canvas_token_ids=tuple(generated.tolist()),
        num_canvas_tokens=int((~is_masked).sum()),
        num_forwards=decoding.num_forwards,
        num_lookahead_wins=decoding.num_lookahead_wins,
        finish_reason=reason,
        first_step_s=decoding.first_step_s,
        total_s=now - decoding.admitted_at,
        tokens_per_step=tuple(decoding.tokens_per_step),
    )


def _find_end(decoding: DecodingRequest, prefix: Int) -> tuple[int, FinishReason | None]:
    """How much of the filled prefix is the answer, and why the request ends, if it does."""
    eos_at = np.flatnonzero(prefix == decoding.rules.eos_token_id)[:1] if decoding.has_eos else prefix[:0]
    num_kept = int(eos_at[0]) + 1 if eos_at.size else len(prefix)
    if decoding.rules.find_stop is not None:
        stop_at = decoding.rules.find_stop(prefix[:num_kept].tolist(), decoding.num_searched)
        if stop_at is not None:
            return stop_at, "stop"
        decoding.num_searched = num_kept  # what is filled stays as it is
    if eos_at.size and decoding.rules.decode.stop_at_eos:
        return num_kept, "eos"
    if _is_done(decoding):
        return num_kept, "eos" if eos_at.size else "length"
    if _is_out_of_steps(decoding):
        return num_kept, "max_steps"
    return num_kept, None


def _is_done(decoding: DecodingRequest) -> bool:
    """No mask left, no block active, and none to open."""
    if any(block.num_masked or block.status is BlockStatus.ACTIVE for block in decoding.blocks):
        return False
    return decoding.has_eos or not decoding.rules.strategy.opens_block(decoding.blocks, last_filled_share=1.0)


def _is_out_of_steps(decoding: DecodingRequest) -> bool:
    return decoding.num_forwards >= (decoding.rules.decode.max_steps or 2 * decoding.rules.decode.max_new_tokens + 16)
