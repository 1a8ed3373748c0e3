"""Fast-dLLM v2 (arXiv 2509.26328): block diffusion in sub-blocks, over a model that predicts a position from the one
before it. The pass over a finished block writes its KV and predicts the first token of the next one.

With `cache: dual` a step forwards the current sub-block alone and reads the block's other keys as an earlier one left
them; it forwards the whole block where the sub-block's first position, which predicts the next, is a mask."""

from __future__ import annotations

from typing import Any

from common.compiled import compiled
from common.decoding.scheduling.strategies.blocks import (
    add_block,
    add_prompt_blocks,
    count_masks,
    last_block,
    set_window,
)
from common.decoding.scheduling.tables import ACTIVE, IN_CACHE, NOWHERE, TO_CACHE, Request
from common.policies.settings import DUAL


@compiled
def begin(request: Request, num_cached: int) -> None:
    prompt_length, size = request.state.prompt_length, request.settings.block_size
    start = prompt_length // size * size
    add_prompt_blocks(request, num_cached, start, TO_CACHE)
    if prompt_length > start:
        add_block(request, start, start + size, ACTIVE, True)


@compiled
def _finished(request: Request) -> int:
    """Return the place of the first block that waits for the cache; -1: none does."""
    for place in range(request.state.num_blocks):
        if request.block_B[place].status == TO_CACHE:
            return place
    return -1


@compiled
def window(request: Request) -> None:
    state, place = request.state, _finished(request)
    if place >= 0:
        block = request.block_B[place]
        set_window(request, block.start, block.end, block.start, block.end - block.start, block.end)
        state.predicts_next = place == state.num_blocks - 1
        return
    block, current = last_block(request), _current(request)
    if request.settings.cache != DUAL:
        set_window(request, block.start, block.end, block.start, 0, block.start)
        return
    if not state.has_block_cache or request.is_masked_P[current]:
        set_window(request, block.start, block.end, block.start, block.end - block.start, block.start)
    else:
        size = request.settings.sub_block_size
        set_window(request, current, current + size, block.end, size, block.start)
    state.is_tentative = True


@compiled
def _current(request: Request) -> int:
    """Return where the first sub-block with masks begins; -1: there is none."""
    block, size = last_block(request), request.settings.sub_block_size
    for start in range(block.start, block.end, size):
        if count_masks(request, start, start + size):
            return start
    return -1


@compiled
def fillable(request: Request, spans: Any) -> int:
    """The first sub-block that holds masks, in a step that writes no final KV."""
    start = -1 if _finished(request) >= 0 else _current(request)
    if start < 0:
        return 0
    span, end = spans[0], start + request.settings.sub_block_size
    span.start, span.end, span.num_masked, span.block = start, end, count_masks(request, start, end), NOWHERE
    span.is_activated, span.num_steps = True, last_block(request).num_steps
    return 1


@compiled
def settle(request: Request, has_changed: bool) -> bool:
    place = _finished(request)
    if place >= 0:
        request.block_B[place].status = IN_CACHE
        return False
    block = last_block(request)
    block.num_steps += 1
    block.num_masked = count_masks(request, block.start, block.end)
    request.state.has_block_cache = block.num_masked > 0
    if not block.num_masked:
        block.status = TO_CACHE
    return False


@compiled
def is_done(request: Request) -> bool:
    """All that was asked for is there, or an end; a finished block is not run once more for nothing."""
    state, last = request.state, last_block(request)
    end = state.prompt_length + request.settings.max_new_tokens
    is_filled = last.end >= end and not count_masks(request, last.start, min(last.end, end))
    return is_filled or (state.has_eos and last.status != ACTIVE)


@compiled
def final_end(request: Request) -> int:
    if not request.settings.ends_at_block:
        return NOWHERE
    end = 0
    for place in range(request.state.num_blocks):
        if request.block_B[place].status != ACTIVE:
            end = request.block_B[place].end
    return end
