"""Which padded numbers of tokens a step runs at: few enough to capture each before the first request, close enough that
padding stays cheap.

The cost of a step is taken as 1 + tokens / knee: reading the weights costs the same whatever the step holds, and at
`knee` tokens the arithmetic costs as much again. Sizes are then as far apart as the tolerated padding allows, wide
where a step is bound by its weights and narrow where every token counts. Prompts cost the most and come in any length:
their sizes lie twice as close.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

Cost = Callable[[int], float]

_MULTIPLE = 8  # what tensor cores and 16-byte loads like
_PROMPT_MULTIPLE = 16  # what libraries like: with 528 tokens their products take less time than with 520
# Up to so many tokens, the multiples and the tolerance of prompts: short parts of them are few, and long ones many.
_FEW_TOKENS, _MANY_TOKENS = 512, 2048
_OF_PROMPTS = ((_FEW_TOKENS, 2 * _PROMPT_MULTIPLE, 0.05), (_MANY_TOKENS, _PROMPT_MULTIPLE, 0.05))


def covering_sizes(limit: int, cost: Cost, *, multiple: int, tolerance: float) -> tuple[int, ...]:
    """Few ascending sizes up to `limit`, such that rounding up to the next costs at most `tolerance` more.

    Sizes are multiples of `multiple`; rounding inside one multiple is free of the tolerance.
    """
    limit = round_up(limit, multiple)
    sizes, size = {limit}, limit
    while size > multiple:
        lower = size - multiple
        while lower >= multiple and cost(size) <= (1 + tolerance) * cost(lower - multiple + 1):
            lower -= multiple
        if lower:
            sizes.add(lower)
        size = lower
    return tuple(sorted(sizes))


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def fit(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `size`; None if none does."""
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


@dataclass(frozen=True)
class Buckets:
    """The padded sizes of one engine.

    knee: tokens at which arithmetic costs as much as reading the weights. max_tokens: larger steps are not padded, and
    run as they are. max_reads: likewise of the positions that go through the head. wanted: sizes that steps usually
    have, such as whole blocks of all branches, so that those are not padded at all. fixed: chosen by the user instead.
    """

    knee: float
    max_tokens: int
    max_reads: int
    tolerance: float = 0.1
    wanted: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()

    @cached_property  # asked at every step
    def tokens(self) -> tuple[int, ...]:
        """Ascending sizes of a step."""
        if self.fixed:
            return self.fixed
        usual = _sizes(self.max_tokens, self.knee, self.tolerance)
        few = max((size for size in usual if size <= _FEW_TOKENS), default=0)
        most = min(usual[-1], _MANY_TOKENS) // _PROMPT_MULTIPLE * _PROMPT_MULTIPLE
        prompts = [size for size in self.of_prompts(most) if size > few]
        others = (size for size in usual if not prompts or not few < size < prompts[-1])
        return tuple(sorted({*prompts, *others, *self.wanted}))

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Ascending numbers of positions that go through the head."""
        return _sizes(self.max_reads, self.knee, self.tolerance)

    def of_prompts(self, limit: int) -> tuple[int, ...]:
        """Ascending sizes of passes over prompts, or over parts of them: up to `limit`, a multiple of 16, which is one.
        Where the user has chosen sizes: those, and the limit."""
        if self.fixed:
            return (*(size for size in self.fixed if size < limit), limit)
        return _prompt_sizes(limit, self.knee, self.tolerance)

    def wanting(self, tokens: Sequence[int]) -> Buckets:
        """The same with these sizes as well."""
        more = {self._rounded(size) for size in tokens if size <= self.max_tokens}
        return replace(self, wanted=tuple(sorted(more.union(self.wanted))))

    def _rounded(self, size: int) -> int:
        rounded = round_up(size, _MULTIPLE if size <= _FEW_TOKENS else _PROMPT_MULTIPLE)
        return rounded if rounded <= self.max_tokens else round_up(size, _MULTIPLE)


@cache
def _sizes(limit: int, knee: float, tolerance: float, multiple: int = _MULTIPLE) -> tuple[int, ...]:
    return covering_sizes(limit, lambda size: 1 + size / knee, multiple=multiple, tolerance=tolerance)


@cache
def _prompt_sizes(limit: int, knee: float, tolerance: float) -> tuple[int, ...]:
    """Ascending sizes of passes over prompts. tolerance: that of passes of many tokens."""
    sizes, covered = {limit}, 0
    for most, multiple, tolerated in (*_OF_PROMPTS, (limit, _PROMPT_MULTIPLE, tolerance)):
        largest = min(most, limit) // multiple * multiple
        sizes.update(size for size in _sizes(largest, knee, tolerated, multiple) if covered < size <= largest)
        covered = max(covered, largest)
    return tuple(sorted(sizes))
