"""D2F (arXiv 2508.09192): blocks open while those before them are still being filled, and enter the cache one after
another. Blocks are counted from the prompt's end, and the prompt is a block of its own."""

from __future__ import annotations

from typing import Any

from common.compiled import compiled
from common.decoding.scheduling.strategies.blocks import (
    active_spans,
    add_block,
    filled_share,
    last_block,
    next_end,
    note_committed,
    num_settled,
    set_window_after_cache,
)
from common.decoding.scheduling.tables import ACTIVE, TO_CACHE, Request


@compiled
def begin(request: Request, num_cached: int) -> None:
    add_block(request, num_cached, request.state.prompt_length, TO_CACHE, True)


@compiled
def opens(request: Request, num_more: int) -> bool:
    block = last_block(request)
    share = filled_share(block, num_more)
    return block.end < request.state.canvas_end and share >= request.settings.block_add_threshold


@compiled
def open_block(request: Request) -> None:
    start, end = last_block(request).end, next_end(request)
    add_block(request, start, end, ACTIVE, request.state.num_blocks == 1)


@compiled
def window(request: Request) -> None:
    set_window_after_cache(request)


@compiled
def fillable(request: Request, spans: Any) -> int:
    return active_spans(request, spans)


@compiled
def settle(request: Request, has_changed: bool) -> bool:
    note_committed(request)
    for place in range(num_settled(request), request.state.num_blocks):
        if request.block_B[place].num_masked:
            break
        request.block_B[place].status = TO_CACHE
    return False


@compiled
def is_done(request: Request) -> bool:
    state = request.state
    return num_settled(request) == state.num_blocks and (state.has_eos or last_block(request).end >= state.canvas_end)
