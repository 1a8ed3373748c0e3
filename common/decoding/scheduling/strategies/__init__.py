"""What each strategy does with a request's blocks: which exist, which may be filled, what a step's window is and when a
block's KV becomes final. LoPA's branches, scores and spawning are the same over all and live beside this folder.

A strategy is a module of compiled functions; the functions below choose by name, and the last line of each stands for
strategies that are not named in it (tests/unit/structure/test_strategy_names.py lists these).
"""

from __future__ import annotations

from typing import Any

from common.compiled import compiled
from common.decoding.scheduling.strategies import block_diffusion, d2f, fast_dllm, fast_dllm_v2, multi_block
from common.decoding.scheduling.tables import NOWHERE, Request
from common.policies.settings import BLOCK_DIFFUSION, D2F, FAST_DLLM_V2, MULTI_BLOCK


@compiled
def begin(request: Request, num_cached: int) -> None:
    """Make the first blocks. num_cached: positions of the prompt whose KV is there already."""
    strategy = request.settings.strategy
    if strategy == D2F:
        d2f.begin(request, num_cached)
    elif strategy == MULTI_BLOCK:
        multi_block.begin(request, num_cached)
    elif strategy == BLOCK_DIFFUSION:
        block_diffusion.begin(request, num_cached)
    elif strategy == FAST_DLLM_V2:
        fast_dllm_v2.begin(request, num_cached)
    else:
        fast_dllm.begin(request, num_cached)


@compiled
def opens(request: Request, num_more: int) -> bool:
    """Return whether a branch that fills so many more positions of the last block appends one block of masks."""
    strategy = request.settings.strategy
    if strategy in (D2F, MULTI_BLOCK):
        return d2f.opens(request, num_more)
    if strategy == BLOCK_DIFFUSION:
        return block_diffusion.opens(request, num_more)
    return False  # the canvas is whole from the start, or (fast_dllm_v2) a block begins with its first token


@compiled
def open_block(request: Request) -> None:
    """Append a block of masks, `block_size` positions after the last one."""
    strategy = request.settings.strategy
    if strategy == BLOCK_DIFFUSION:
        block_diffusion.open_block(request)
    elif strategy == FAST_DLLM_V2:
        fast_dllm_v2.open_block(request)
    else:
        d2f.open_block(request)


@compiled
def window(request: Request) -> None:
    """Write into the state what the coming step computes."""
    strategy = request.settings.strategy
    if strategy == D2F:
        d2f.window(request)
    elif strategy == MULTI_BLOCK:
        multi_block.window(request)
    elif strategy == BLOCK_DIFFUSION:
        block_diffusion.window(request)
    elif strategy == FAST_DLLM_V2:
        fast_dllm_v2.window(request)
    else:
        fast_dllm.window(request)


@compiled
def fillable(request: Request, spans: Any) -> int:
    """Write the blocks, or parts of one, whose masks may be filled, and from which lookaheads are spawned; returns how
    many."""
    strategy = request.settings.strategy
    if strategy in (D2F, MULTI_BLOCK):
        return d2f.fillable(request, spans)
    if strategy == BLOCK_DIFFUSION:
        return block_diffusion.fillable(request, spans)
    if strategy == FAST_DLLM_V2:
        return fast_dllm_v2.fillable(request, spans)
    return fast_dllm.fillable(request, spans)


@compiled
def settle(request: Request, has_changed: bool) -> bool:
    """Move finished blocks towards the cache after the winner's fill; returns whether the cache must be rebuilt by the
    next step. has_changed: the step has filled or edited something."""
    strategy = request.settings.strategy
    if strategy == D2F:
        return d2f.settle(request, has_changed)
    if strategy == MULTI_BLOCK:
        return multi_block.settle(request, has_changed)
    if strategy == BLOCK_DIFFUSION:
        return block_diffusion.settle(request, has_changed)
    if strategy == FAST_DLLM_V2:
        return fast_dllm_v2.settle(request, has_changed)
    return fast_dllm.settle(request, has_changed)


@compiled
def is_done(request: Request) -> bool:
    """Return whether nothing is left to do."""
    strategy = request.settings.strategy
    if strategy in (D2F, MULTI_BLOCK):
        return d2f.is_done(request)
    if strategy == BLOCK_DIFFUSION:
        return block_diffusion.is_done(request)
    if strategy == FAST_DLLM_V2:
        return fast_dllm_v2.is_done(request)
    return fast_dllm.is_done(request)


@compiled
def final_end(request: Request) -> int:
    """Return the position below which filled positions can no longer change; NOWHERE: no filled position can."""
    strategy = request.settings.strategy
    if strategy == BLOCK_DIFFUSION:
        return block_diffusion.final_end(request)
    if strategy == FAST_DLLM_V2:
        return fast_dllm_v2.final_end(request)
    return NOWHERE
