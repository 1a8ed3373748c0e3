"""The main loop: every rank of a replica runs it, on the same plans and the same predictions."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import numpy as np

from common.config import DecodeConfig
from common.decoding.engine import Capacity, Engine, start_forward
from common.decoding.plan import Predictions, StepPlan
from common.decoding.request import Completion, GenerationRequest, Rejection, RequestQueue
from common.decoding.scheduler import Scheduler
from common.errors import EngineError


def decode_requests(
    requests: Iterator[GenerationRequest], scheduler: Scheduler, engine: Engine
) -> Iterator[Completion | Rejection]:
    """Decode all requests, as many at once as the engine can hold; yield each as it ends.

    What is yielded is detokenised and written, and the next request read, while the device computes the next step. An
    error of the input is raised once all that came before it has ended.
    """
    queue, ended = RequestQueue(requests), list[Completion | Rejection]()
    while True:
        try:
            ended += admit_requests(queue, scheduler, engine)
            plan = scheduler.plan_step() if scheduler.active else None
            receive = start_forward(engine, plan) if plan else None
        finally:
            # While the device computes. Results of the last step are handed over even if this step cannot start.
            yield from ended
        if plan is None or receive is None:
            return queue.raise_failure()
        queue.prefetch()
        winners = scheduler.select_winners(finite(receive(), plan, scheduler, engine))
        engine.commit(plan, winners)
        ended = [*scheduler.advance(winners)]


def finite(predictions: Predictions, plan: StepPlan, scheduler: Scheduler, engine: Engine) -> Predictions:
    """The predictions, if every number that the scheduler will read is one. NaN would win every comparison unseen.

    Raises EngineError naming rank, step and request.
    """
    if isfinite(predictions.values_3RW.sum()):  # of values that nobody reads too: a sum costs a step the least
        return predictions
    is_bad_RW = ~np.isfinite(predictions.values_3RW).all(axis=0) & plan.is_read_RW
    if not is_bad_RW.any():
        return predictions
    row = int(is_bad_RW.any(axis=1).argmax())
    request = scheduler.active[int(plan.request_R[row])].request
    raise EngineError(
        f"rank {engine.mesh.rank}, step {plan.step_R[row]} of request {request.id}: the model's output is not finite: "
        "its weights hold NaN or infinity, or overflow in this dtype or quantization"
    )


def admit_requests(queue: RequestQueue, scheduler: Scheduler, engine: Engine) -> Iterator[Rejection]:
    """Fill the free slots while the engine has room; reject what it could not decode if it were empty."""
    while scheduler.has_free_slot and (request := queue.first()) is not None:
        reason = _why_impossible(request, scheduler.decode, engine.capacity)
        if reason is None:
            prompt_lengths = [decoding.prompt_length for decoding in scheduler.active]
            if not engine.capacity.can_hold([*prompt_lengths, len(request.prompt)], scheduler.decode):
                return
            scheduler.admit(request)
        queue.take()
        if reason is not None:
            yield Rejection(request.id, reason)


def _why_impossible(request: GenerationRequest, decode: DecodeConfig, capacity: Capacity) -> str | None:
    num_tokens, room = len(request.prompt), capacity.max_model_len - decode.max_new_tokens
    if not num_tokens:
        return "the prompt is empty; give at least one token"
    strangers = [token for token in request.prompt if not _is_token(token, capacity.vocab_size)]
    if strangers:
        return (
            f"the prompt holds {strangers[0]!r}, which is no token: the model's vocabulary has {capacity.vocab_size}; "
            "use the tokenizer of this checkpoint"
        )
    if num_tokens > room:
        return (
            f"the prompt has {num_tokens} tokens, {room} fit beside max_new_tokens {decode.max_new_tokens}; "
            "shorten it, or raise max_model_len in the profile if the model has more positions"
        )
    if not capacity.can_hold([num_tokens], decode):
        return (
            f"the prompt of {num_tokens} tokens and max_new_tokens {decode.max_new_tokens} do not fit the engine's KV "
            "memory; lower max_new_tokens or num_lookahead, or raise gpu_memory_utilization in the profile"
        )
    return None


def _is_token(token: object, vocab_size: int | None) -> bool:
    if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
        return False
    return int(token) >= 0 and (vocab_size is None or int(token) < vocab_size)
