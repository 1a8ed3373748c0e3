"""What strategies have in common: blocks of a request in order, those in the cache first, then those that wait for it,
then the active ones. `opens`, `open_block` and `final_end` are those of a strategy without its own."""

from __future__ import annotations

from typing import Any

from common.compiled import compiled, inlined
from common.decoding.scheduling.tables import ACTIVE, IN_CACHE, NOWHERE, TO_CACHE, Request


@compiled
def add_block(request: Request, start: int, end: int, status: int, is_activated: bool) -> None:
    """Append a block. is_activated: it has to fill at least one position a step."""
    block = request.block_B[request.state.num_blocks]
    block.start, block.end, block.num_masked = start, end, count_masks(request, start, end)
    block.status, block.is_activated = status, is_activated
    block.num_steps, block.num_edit_steps, block.num_waits = 0, 0, 0
    request.state.num_blocks += 1


@compiled
def opens(request: Request, num_more: int) -> bool:
    """Return False: the canvas is whole from the start, or a block begins with its first token."""
    return False


@compiled
def open_block(request: Request) -> None:
    """Append a block of `block_size` positions after the last one."""
    start, end = last_block(request).end, next_end(request)
    add_block(request, start, end, ACTIVE, True)


@compiled
def final_end(request: Request) -> int:
    """Return NOWHERE: no filled position can change."""
    return NOWHERE


@inlined
def last_block(request: Request) -> Any:
    """Return the block that was opened last."""
    return request.block_B[request.state.num_blocks - 1]


@compiled
def next_end(request: Request) -> int:
    """Return where a block ends that is opened after the last one: after `block_size` positions, or with the canvas,
    where smaller blocks before it have left less."""
    return min(last_block(request).end + request.settings.block_size, request.state.canvas_end)


@compiled
def filled_share(block: Any, num_more: int) -> float:
    """Return how much of the block is filled if so many more of its masks were; what the prompt fills counts."""
    length = block.end - block.start
    return (length - block.num_masked + num_more) / length  # 1 - x / length may round below a threshold that is met


@compiled
def num_settled(request: Request) -> int:
    """Return how many blocks come before the active ones."""
    count = request.state.num_blocks
    while count and request.block_B[count - 1].status == ACTIVE:
        count -= 1
    return count


@compiled
def set_window(request: Request, start: int, end: int, cached: int, commit_length: int, next_start: int) -> None:
    """Have the coming step compute positions [start, end) beside cached keys up to `cached`; the first `commit_length`
    of them become final, and the next step's window begins at `next_start`."""
    state = request.state
    state.window_start, state.window_end, state.window_cached = start, end, max(cached, start)
    state.commit_length, state.next_start = commit_length, next_start
    state.predicts_next, state.is_tentative = False, False


@compiled
def set_window_after_cache(request: Request) -> None:
    """Have the coming step compute everything that is not cached; what waits for the cache becomes final."""
    block_B, num_committed = request.block_B, num_settled(request)
    first = num_committed
    while first and block_B[first - 1].status == TO_CACHE:
        first -= 1
    end = last_block(request).end
    start = block_B[first].start if first < request.state.num_blocks else end  # a branch may open the first block
    commit_end = block_B[num_committed - 1].end if first < num_committed else start
    set_window(request, start, end, start, commit_end - start, commit_end)


@compiled
def commits_next(request: Request) -> bool:
    """Return whether the coming step writes KV that stays."""
    state = request.state
    place = num_settled(request)
    return not state.is_refreshed or (place > 0 and request.block_B[place - 1].status == TO_CACHE)


@compiled
def note_committed(request: Request) -> None:
    """Note, after a pass over `set_window_after_cache`, that what waited for the cache is in it."""
    for place in range(request.state.num_blocks - 1, -1, -1):
        block = request.block_B[place]
        if block.status == IN_CACHE:
            break
        if block.status == TO_CACHE:
            block.status = IN_CACHE


@compiled
def add_prompt_blocks(request: Request, num_cached: int, prompt_end: int, status: int) -> None:
    """Append the prompt's whole blocks [num_cached, prompt_end), in chunks, counted from 0, that each take a pass."""
    size = request.state.chunk if request.state.chunk else max(prompt_end, 1)
    start = num_cached
    while start < prompt_end:
        end = min((start // size + 1) * size, prompt_end)
        add_block(request, start, end, status, True)
        start = end


@compiled
def next_chunk(request: Request) -> int:
    """Return the place of the prompt's part that the coming step takes, if another part waits after it; else -1."""
    found, state = -1, request.state
    if state.chunk:
        for place in range(state.num_blocks):
            block = request.block_B[place]
            if block.end > state.prompt_length:
                break
            if block.status == TO_CACHE:
                if found >= 0:
                    return found
                found = place
    return -1


@compiled
def settle_chunk(request: Request) -> bool:
    """Note that the prompt's part which the step took is in the cache; returns False if it took none."""
    place = next_chunk(request)
    if place < 0:
        return False
    request.block_B[place].status = IN_CACHE
    return True


@compiled
def num_prompt_positions(request: Request) -> int:
    """Return how many positions of the prompt the coming step takes."""
    for place in range(request.state.num_blocks):
        block = request.block_B[place]
        if block.end > request.state.prompt_length:
            break
        if block.status == TO_CACHE:
            return int(block.end - block.start)
    return 0


@compiled
def set_span(span: Any, request: Request, place: int) -> None:
    """Make the whole block at `place` a span that may be filled."""
    block = request.block_B[place]
    span.start, span.end, span.num_masked, span.block = block.start, block.end, block.num_masked, place
    span.is_activated, span.num_steps = block.is_activated, block.num_steps


@compiled
def active_spans(request: Request, spans: Any) -> int:
    """Make spans of the active blocks; returns how many."""
    first = num_settled(request)
    for place in range(first, request.state.num_blocks):
        set_span(spans[place - first], request, place)
    return int(request.state.num_blocks - first)


@compiled
def count_masks(request: Request, start: int, end: int) -> int:
    """Return how many positions of [start, end) are masks."""
    count = 0
    for position in range(start, end):
        count += request.is_masked_P[position]
    return count
