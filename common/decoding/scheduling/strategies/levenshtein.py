"""LLaDA2.2: block diffusion whose active block is revised (`revising`, beside this) until it rests. Its KV is final
once a pass has seen its final tokens: the first pass of the next block writes it, or as published one of its own after
a last round."""

from __future__ import annotations

from common.compiled import compiled
from common.decoding.scheduling.strategies import block_diffusion
from common.decoding.scheduling.strategies.blocks import last_block, next_chunk, note_committed, settle_chunk
from common.decoding.scheduling.tables import ACTIVE, GOES_ON, IN_CACHE, IS_SPENT, TO_CACHE, Request

_begin_block_diffusion = block_diffusion.begin


@compiled
def begin(request: Request, num_cached: int) -> None:
    _begin_block_diffusion(request, num_cached)
    for place in range(request.state.num_blocks):  # of the prompt, which as published takes a pass of its own
        request.block_B[place].num_waits = request.settings.commits_apart


@compiled
def opens(request: Request, num_more: int) -> bool:
    last = last_block(request)
    if last.status == ACTIVE or (last.status == TO_CACHE and last.num_waits):
        return False
    return last.end < request.state.num_positions and next_chunk(request) < 0


@compiled
def settle(request: Request, has_changed: bool) -> bool:
    if settle_chunk(request):
        return False
    note_committed(request)
    last, outcome = last_block(request), request.state.outcome
    if last.status == ACTIVE and outcome != GOES_ON:
        last.status, last.num_waits = TO_CACHE, outcome == IS_SPENT
    return False


@compiled
def is_done(request: Request) -> bool:
    last = last_block(request)
    if last.status == ACTIVE or (last.status == TO_CACHE and last.num_waits):
        return False
    return request.state.has_eos or last.end >= request.state.num_positions


@compiled
def final_end(request: Request) -> int:
    """The end of the blocks that rest; where a pass of its own writes KV, an end counts after it, as published."""
    end = 0
    for place in range(request.state.num_blocks):
        block = request.block_B[place]
        if block.status == IN_CACHE or (block.status == TO_CACHE and not block.num_waits):
            end = block.end
    return end
