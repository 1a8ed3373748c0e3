"""Which padded (rows, width) a step runs at: few enough to capture each once, close enough that padding stays cheap.

The cost of a step is taken as 1 + tokens / knee: reading the weights costs the same whatever the step holds, and at
`knee` tokens the arithmetic costs as much again. Sizes are then as far apart as the tolerated padding allows, wide
where a step is bound by its weights and narrow where every token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

Cost = Callable[[int], float]

_MULTIPLE = 8  # widths: what tensor cores and 16-byte loads like; read counts likewise
_EXACT_ROWS = 16  # up to here every number of rows is a bucket


def covering_sizes(
    limit: int, cost: Cost, *, multiple: int, tolerance: float, wanted: Sequence[int] = ()
) -> tuple[int, ...]:
    """Ascending sizes up to `limit`, few, such that rounding up to the next costs at most `tolerance` more.

    Sizes are multiples of `multiple` (rounding inside one multiple is free of the tolerance), plus those `wanted`.
    """
    limit = round_up(limit, multiple)
    sizes, size = {limit, *(want for want in wanted if want < limit)}, limit
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
    return next((candidate for candidate in sizes if candidate >= size), None)


def pad_rows(num_rows: int) -> int:
    """Exact up to 16 rows, then at most one in 16 more."""
    multiple = 1 << max(0, (num_rows - 1).bit_length() - _EXACT_ROWS.bit_length() + 1)
    return round_up(num_rows, multiple)


@dataclass(frozen=True)
class Buckets:
    """The padded shapes of one engine.

    knee: tokens at which arithmetic costs as much as reading the weights. max_width, max_tokens: steps beyond them
    are not bucketed (a prompt's first pass is compute-bound, comes once, and needs no replay). wanted_widths: sizes
    that steps usually have, such as whole blocks, so that those are not padded at all. widths, rows: fixed by the
    user instead.
    """

    knee: float
    max_width: int
    max_tokens: int
    tolerance: float = 0.1
    wanted_widths: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    @cache  # noqa: B019  # asked between two steps, by one engine with one of these
    def shape(self, num_rows: int, width: int) -> tuple[int, int] | None:
        """Padded (rows, width), or None where the step should run as it is."""
        padded_rows = fit(num_rows, self.rows) if self.rows else pad_rows(num_rows)
        if padded_rows is None:
            return None
        padded_width = fit(width, self.widths or self._widths(padded_rows))
        if padded_width is None or padded_rows * padded_width > self.max_tokens:
            return None
        return padded_rows, padded_width

    def reads(self, count: int) -> int:
        """Padded number of positions that go through the head."""
        limit = max(count, self.max_tokens)
        padded = fit(count, _sizes(limit, self.knee, self.tolerance, 1, ()))
        assert padded is not None, "the limit is at least the count"
        return padded

    def reads_up_to(self, count: int) -> tuple[int, ...]:
        """Every padded number of reads up to the one that holds `count`, ascending."""
        padded = self.reads(count)
        sizes = _sizes(max(count, self.max_tokens), self.knee, self.tolerance, 1, ())
        return tuple(size for size in sizes if size <= padded)

    def _widths(self, num_rows: int) -> tuple[int, ...]:
        return _sizes(self.max_width, self.knee, self.tolerance, num_rows, self.wanted_widths)


@cache
def _sizes(limit: int, knee: float, tolerance: float, num_rows: int, wanted: tuple[int, ...]) -> tuple[int, ...]:
    return covering_sizes(
        limit,
        lambda size: 1 + num_rows * size / knee,
        multiple=_MULTIPLE,
        tolerance=tolerance,
        wanted=wanted,
    )


def cached_bucket(num_cached: int, max_cached: int) -> int:
    """Keys that attention looks at where it cannot read lengths on the device: the next power of two, at least 64."""
    if num_cached == 0:
        return 0
    return min(max_cached, max(64, 1 << (num_cached - 1).bit_length()))
