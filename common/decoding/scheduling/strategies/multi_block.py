"""d3LLM's multi-block decoding (arXiv 2601.07568): blocks open as D2F's do, but the canvas is whole, and a block's KV
is kept late: a finished block waits for `cache_delay` passes, and so does the prompt, which is finished a pass before
the first. While something waits, passes forward everything and renew what is cached: attention is full, so keys change
with what is filled after them."""

from __future__ import annotations

from common.compiled import compiled
from common.decoding.scheduling.strategies.blocks import add_block, set_window
from common.decoding.scheduling.tables import ACTIVE, IN_CACHE, TO_CACHE, Request


@compiled
def begin(request: Request, num_cached: int) -> None:
    add_block(request, 0, request.state.prompt_length, TO_CACHE, True)
    request.block_B[0].num_waits = 1


@compiled
def window(request: Request) -> None:
    state = request.state
    end = state.canvas_end
    cached, ready_end, is_waiting = 0, 0, False
    for place in range(state.num_blocks):
        block = request.block_B[place]
        if block.status == IN_CACHE:
            cached = block.end
        elif block.status == TO_CACHE:
            is_waiting = True
            if block.num_waits >= request.settings.cache_delay:
                ready_end = block.end
    if ready_end:
        set_window(request, cached, end, cached, ready_end - cached, ready_end)
    elif is_waiting:
        set_window(request, 0, end, 0, cached, cached)
    else:
        set_window(request, cached, end, cached, 0, cached)


@compiled
def settle(request: Request, has_changed: bool) -> bool:
    is_first = True  # no block with masks has come yet
    for place in range(request.state.num_blocks):
        block = request.block_B[place]
        if block.status == TO_CACHE:
            if block.num_waits >= request.settings.cache_delay:
                block.status = IN_CACHE
            else:
                block.num_waits += 1
        is_first = is_first and not block.num_masked
        if is_first and block.status == ACTIVE:
            block.status = TO_CACHE
    return False
