"""The main loop: every rank of a replica runs it, on the same plans and the same predictions."""

from __future__ import annotations

from collections.abc import Iterator

from common.config import DecodeConfig
from common.decoding.engine import Capacity, Engine, start_forward
from common.decoding.request import Completion, GenerationRequest, Rejection, RequestQueue
from common.decoding.scheduler import Scheduler


def decode_requests(
    requests: Iterator[GenerationRequest], scheduler: Scheduler, engine: Engine
) -> Iterator[Completion | Rejection]:
    """Decode all requests, as many at once as the engine can hold; yield each as it ends.

    What is yielded is detokenised and written, and the next request read, while the device computes the next step.
    """
    queue, ended = RequestQueue(requests), list[Completion | Rejection]()
    while True:
        ended += admit_requests(queue, scheduler, engine)
        if not scheduler.active:
            yield from ended
            return
        plan = scheduler.plan_step()
        try:
            receive = start_forward(engine, plan)
        finally:
            yield from ended
        queue.prefetch()
        winners = scheduler.select_winners(receive())
        engine.commit(plan, winners)
        ended = [*scheduler.advance(winners)]


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
