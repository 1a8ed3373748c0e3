"""What each strategy does with a request's blocks: which exist, which may be filled, what a step's window is and when a
block's KV becomes final. LoPA's branches, scores and spawning are the same over all and live beside this folder.

A strategy is a module of compiled functions with the names below, and a line in `MODULES`; what it does not define is
taken from the next module of its line, and last from `blocks`. Its settings are a class of
`common/config/strategies.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from common.compiled import kept_by_callers
from common.decoding.scheduling.strategies import (
    block_diffusion,
    blocks,
    d2f,
    fast_dllm,
    fast_dllm_v2,
    levenshtein,
    multi_block,
)
from common.decoding.scheduling.tables import Request
from common.policies.settings import STRATEGIES

MODULES: dict[str, tuple[ModuleType, ...]] = {
    "d2f": (d2f,), "multi_block": (multi_block, d2f), "fast_dllm": (fast_dllm,), "vanilla": (fast_dllm,),
    "block_diffusion": (block_diffusion,), "fast_dllm_v2": (fast_dllm_v2,),
    "levenshtein": (levenshtein, block_diffusion),
}  # fmt: skip


def _of_strategy(name: str, code: int = 0) -> Callable[..., Any]:
    """Return a function that calls this one of the request's strategy, which has this code or a higher one."""
    modules = (*MODULES[STRATEGIES[code]], blocks)
    own: Callable[..., Any] = next(getattr(module, name) for module in modules if hasattr(module, name))
    if code == len(STRATEGIES) - 1:
        return own
    of_others = _of_strategy(name, code + 1)

    @kept_by_callers
    def choose(request: Request, *more: Any) -> Any:
        if request.settings.strategy == code:
            return own(request, *more)
        return of_others(request, *more)

    return choose


# begin(request, num_cached): make the first blocks. num_cached: positions of the prompt whose KV is there already.
begin: Callable[[Request, int], None] = _of_strategy("begin")

# opens(request, num_more): whether a branch that fills so many more positions of the last block appends one of masks.
opens: Callable[[Request, int], bool] = _of_strategy("opens")

# open_block(request): append a block of masks after the last one.
open_block: Callable[[Request], None] = _of_strategy("open_block")

# window(request): write into the state what the coming step computes.
window: Callable[[Request], None] = _of_strategy("window")

# fillable(request, spans): write the blocks, or parts of one, whose masks may be filled, and from which lookaheads are
# spawned; returns how many.
fillable: Callable[[Request, Any], int] = _of_strategy("fillable")

# settle(request, has_changed): move finished blocks towards the cache after the winner's fill; returns whether the
# cache must be rebuilt by the next step. has_changed: the step has filled or edited something.
settle: Callable[[Request, bool], bool] = _of_strategy("settle")

# is_done(request): whether nothing is left to do.
is_done: Callable[[Request], bool] = _of_strategy("is_done")

# final_end(request): the position below which filled positions can no longer change; NOWHERE: no filled position can.
final_end: Callable[[Request], int] = _of_strategy("final_end")
