"""Strategies whose canvas is whole from the start.

Fast-dLLM (arXiv 2505.22618) over LLaDA and Dream: blocks decoded in order; one full forward at each block's start
rebuilds the cache. With `cache: none` every forward is a full one, which with `fill_rule: static` is LLaDA's own way.
Vanilla: the canvas is one block and nothing is cached."""

from __future__ import annotations

from typing import Any

from common.compiled import compiled
from common.decoding.scheduling.strategies.blocks import (
    active_spans,
    add_block,
    count_masks,
    last_block,
    num_settled,
    set_span,
    set_window,
)
from common.decoding.scheduling.tables import ACTIVE, IN_CACHE, NOWHERE, Request
from common.policies.settings import DUAL, NONE, VANILLA


@compiled
def begin(request: Request, num_cached: int) -> None:
    state = request.state
    add_block(request, 0, state.prompt_length, IN_CACHE, True)
    while last_block(request).end < state.canvas_end:
        start = last_block(request).end
        add_block(request, start, start + state.canvas_block, ACTIVE, True)


@compiled
def window(request: Request) -> None:
    end, cache = last_block(request).end, request.settings.cache
    if request.settings.strategy == VANILLA or cache == NONE:
        set_window(request, 0, end, 0, 0, 0)
        return
    current = request.block_B[num_settled(request)]
    if not request.state.is_refreshed:
        set_window(request, 0, end, 0, end if cache == DUAL else current.start, current.start)
    elif cache == DUAL:
        set_window(request, current.start, current.end, end, 0, current.start)
    else:
        set_window(request, current.start, end, current.start, 0, current.start)


@compiled
def fillable(request: Request, spans: Any) -> int:
    """The current block; where the cache is rebuilt, also what `max_block_steps` has left in those before it."""
    if request.settings.strategy == VANILLA:
        return active_spans(request, spans)
    place, num_left, first = num_settled(request), 0, -1
    set_span(spans[0], request, place)
    if request.state.is_refreshed or not request.settings.max_block_steps:
        return 1
    for before in range(place):
        if request.block_B[before].num_masked:
            num_left += request.block_B[before].num_masked
            first = request.block_B[before].start if first < 0 else first
    if num_left:
        spans[0].start, spans[0].block, spans[0].is_activated = first, NOWHERE, True
        spans[0].num_masked += num_left
    return 1


@compiled
def settle(request: Request, has_changed: bool) -> bool:
    state, settings, place = request.state, request.settings, num_settled(request)
    current = request.block_B[place]
    current.num_steps += 1
    if settings.strategy == VANILLA:
        if current.num_masked == 0:
            current.status = IN_CACHE
        return False
    if settings.max_block_steps:
        for each in range(state.num_blocks):
            block = request.block_B[each]
            block.num_masked = count_masks(request, block.start, block.end)
    if current.num_steps < settings.min_block_steps:
        return False
    is_stale = current.num_steps == settings.max_block_steps
    if is_stale:
        current.status = IN_CACHE
        place += 1
    while place < state.num_blocks and not request.block_B[place].num_masked:
        request.block_B[place].status, is_stale = IN_CACHE, True
        place += 1
    return is_stale


@compiled
def is_done(request: Request) -> bool:
    return num_settled(request) == request.state.num_blocks
