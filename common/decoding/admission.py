"""Which requests are not decoded, and why: those that the engine could never hold."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from common.decoding.engine import Capacity
from common.decoding.request import GenerationRequest
from common.decoding.scheduling.scheduler import Scheduler
from common.errors import first_line


def why_impossible(request: GenerationRequest, scheduler: Scheduler, capacity: Capacity) -> str | None:
    """Return why this engine could not decode the request even if it were empty; None if it could."""
    try:
        return _why_impossible(request, scheduler, capacity)
    except Exception as error:  # whatever a request holds, or another package's stop finder does
        return f"it cannot be judged ({type(error).__name__}: {first_line(error)}); correct it"


def _why_impossible(request: GenerationRequest, scheduler: Scheduler, capacity: Capacity) -> str | None:
    decode = scheduler.decode_of(request)
    num_tokens, room = len(request.prompt), scheduler.room_of(request).longest_prompt(capacity.max_model_len)
    if not num_tokens:
        return "the prompt is empty; give at least one token"
    unknown = unknown_tokens(request.prompt, capacity.vocab_size)
    if unknown:
        return (
            f"the prompt holds {unknown[0]!r}, which is no token: the model's vocabulary has {capacity.vocab_size}; "
            "use the tokenizer of this checkpoint"
        )
    if request.canvas is not None and (unknown := unknown_tokens(request.given.values(), capacity.vocab_size)):
        return f"canvas: it holds {unknown[0]!r}, which is no token of the model's vocabulary of {capacity.vocab_size}"
    if (reason := scheduler.why_apart(decode)) is not None:
        return reason
    if (reason := capacity.why_refused(decode) or scheduler.why_not_held(request)) is not None:
        return reason
    if request.num_logprobs is not None:
        if not capacity.gives_logprobs:
            return "logprobs: this engine tells no log probabilities; ask for none"
        most = capacity.vocab_size
        if request.num_logprobs < 0 or (most is not None and request.num_logprobs > most):
            return f"logprobs: {request.num_logprobs} alternatives, of a vocabulary of {most}: ask for fewer, or none"
    if scheduler.asks_for_length(request) and not capacity.gives_logprobs:
        return "survival_margin: this engine tells no log probabilities; set it to null"
    if num_tokens > room:
        return (
            f"the prompt has {num_tokens} tokens, {max(room, 0)} fit beside max_new_tokens {decode.max_new_tokens}; "
            "shorten it, or raise max_model_len in the profile if the model has more positions"
        )
    if not capacity.can_hold([scheduler.room_of(request)]):
        return (
            f"the prompt of {num_tokens} tokens and max_new_tokens {decode.max_new_tokens} do not fit the engine's KV "
            "memory; lower max_new_tokens or num_lookahead, or raise gpu_memory_utilization in the profile"
        )
    return None


def unknown_tokens(token_ids: Collection[int], vocab_size: int | None) -> list[int]:
    """Return what of them is not a token id of the vocabulary."""
    # Nearly always all of them are, and a prompt may be long.
    is_usual = set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0
    if is_usual and (vocab_size is None or max(token_ids, default=0) < vocab_size):
        return []
    return [token for token in token_ids if not _is_token(token, vocab_size)]


def _is_token(token: object, vocab_size: int | None) -> bool:
    if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
        return False
    return int(token) >= 0 and (vocab_size is None or int(token) < vocab_size)
