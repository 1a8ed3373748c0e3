"""Block diffusion (SDAR, TraDo, LLaDA2): blocks are counted from position 0, the prompt's remainder shares the first
one, attention is block-causal, and a finished block's KV is written by a pass that sees all of its tokens.

`commit: fused` writes it in the first pass of the next block, `separate` in a pass of its own, as published. With
`edit_threshold` a block without masks is edited until a step changes nothing, or for `max_post_edit_steps`."""

from __future__ import annotations

from typing import Any

from common.compiled import compiled
from common.decoding.scheduling.strategies.blocks import (
    active_spans,
    add_block,
    add_prompt_blocks,
    filled_share,
    last_block,
    next_chunk,
    note_committed,
    num_settled,
    set_window,
    set_window_after_cache,
    settle_chunk,
)
from common.decoding.scheduling.tables import ACTIVE, IN_CACHE, NOWHERE, TO_CACHE, Request
from common.policies.settings import NONE


@compiled
def commits_apart(request: Request) -> bool:
    """Return whether a finished block's KV is written by a pass of its own."""
    return request.settings.commits_apart and request.settings.cache != NONE


@compiled
def begin(request: Request, num_cached: int) -> None:
    state, settings = request.state, request.settings
    start = state.prompt_length // settings.block_size * settings.block_size
    add_prompt_blocks(request, num_cached, start, IN_CACHE if settings.cache == NONE else TO_CACHE)
    if state.prompt_length > start and not (state.num_blocks and commits_apart(request)):
        _add(request, start, True)


@compiled
def _add(request: Request, start: int, is_activated: bool) -> None:
    end = start + request.settings.block_size
    add_block(request, start, end, ACTIVE, is_activated)


@compiled
def opens(request: Request, num_more: int) -> bool:
    settings, last = request.settings, last_block(request)
    if last.end >= request.state.num_positions or filled_share(last, num_more) < settings.block_add_threshold:
        return False
    if settings.cache == NONE or settings.commits_apart:
        can_begin = last.status == IN_CACHE
    else:
        can_begin = not settings.edits or last.status != ACTIVE
    return can_begin and next_chunk(request) < 0


@compiled
def open_block(request: Request) -> None:
    end = last_block(request).end
    _add(request, end, end <= request.state.prompt_length)


@compiled
def window(request: Request) -> None:
    if request.settings.cache == NONE:
        set_window(request, 0, last_block(request).end, 0, 0, 0)
        return
    place = next_chunk(request)
    if place < 0:
        set_window_after_cache(request)
        return
    chunk = request.block_B[place]
    set_window(request, chunk.start, chunk.end, chunk.start, chunk.end - chunk.start, chunk.end)


@compiled
def fillable(request: Request, spans: Any) -> int:
    return 0 if next_chunk(request) >= 0 else active_spans(request, spans)


@compiled
def settle(request: Request, has_changed: bool) -> bool:
    if settle_chunk(request):
        return False
    note_committed(request)
    for each in range(num_settled(request), request.state.num_blocks):
        block = request.block_B[each]
        block.num_steps += 1
        if not _is_finished(request, block, has_changed):
            break
        block.status = IN_CACHE if request.settings.cache == NONE else TO_CACHE
    return False


@compiled
def _is_finished(request: Request, block: Any, has_changed: bool) -> bool:
    if block.num_masked or not request.settings.edits:
        return block.num_masked == 0
    if block.num_edit_steps and not has_changed:
        return True
    # As published, a step more that looks and may change nothing.
    return block.num_edit_steps >= request.settings.max_post_edit_steps + commits_apart(request)


@compiled
def is_done(request: Request) -> bool:
    last = last_block(request)
    if last.status == ACTIVE or (request.settings.commits_apart and last.status != IN_CACHE):
        return False
    return request.state.has_eos or last.end >= request.state.num_positions


@compiled
def final_end(request: Request) -> int:
    """While blocks are edited, and where an end counts only once its block is finished: the end of finished blocks."""
    settings, end = request.settings, 0
    if not settings.edits and not settings.ends_at_block:
        return NOWHERE
    for place in range(request.state.num_blocks):
        status = request.block_B[place].status
        if status == IN_CACHE or (status == TO_CACHE and not settings.commits_apart):
            end = request.block_B[place].end
    return end
