"""Which shape a pass has: rows dealt over the branch ranks or entries cut, padded to what is captured where that fits.

Every rank comes to the same numbers of tokens and tiles, since they depend on the plan alone.
"""

from __future__ import annotations

from bisect import bisect_left

from common.decoding import Int, Sampling, StepPlan
from common.processes import Mesh
from graphs.buckets import Buckets, fit, round_up
from lopa_cuda.steps import (
    LayersKey,
    ReadsKey,
    Share,
    Tiling,
    cut,
    deal,
    runs_of,
    slice_length,
    slice_sizes,
    slices_pay,
)


class Shapes:
    """buckets bounds what is captured. tiling: of operators that take lengths from the device; None: of others. staged:
    tokens of the staging memory that captures have."""

    def __init__(self, mesh: Mesh, buckets: Buckets, tiling: Tiling | None, staged: int, *, captures: bool) -> None:
        self.buckets = buckets
        self._mesh = mesh
        self._tiling = tiling
        self._staged = staged
        self._captures = captures

    @property
    def captures_ahead(self) -> bool:
        """Whether a size is all that a capture depends on: operators that look at host numbers of keys make many."""
        return self._captures and self._tiling is not None

    @property
    def slices(self) -> list[int]:
        """Ascending sizes at which passes are captured that are cut over ranks. Where captures depend on the rank's
        rows there are none: a first run holds collectives, so all ranks must capture at the same steps."""
        if not self.captures_ahead:
            return []
        return slice_sizes(self.buckets.of_prompts, self._mesh.bp_size, self._staged)

    def arranged(self, plan: StepPlan, row_of: Int) -> tuple[list[Share], LayersKey]:
        """What each rank computes, and in which shape."""
        if slices_pay(plan, row_of):
            return self._cut(plan)
        shares = deal(plan, row_of)
        return shares, self.dealt_key(shares)

    def dealt_key(self, shares: list[Share]) -> LayersKey:
        num_tokens = max(share.num_tokens for share in shares)
        if self._captures:
            sizes = self.buckets.tokens
            for size in sizes[bisect_left(sizes, num_tokens) :]:
                if self._tiling is None:
                    return LayersKey(size, 0, runs_of(shares[self._mesh.bp_rank], size), is_captured=True)
                key = self.captured_key(size)
                if self._num_tiles(shares, size) <= key.num_tiles:
                    return key
        return self._key_as_it_is(shares, self._aligned(num_tokens))

    def captured_key(self, num_tokens: int, *, is_cut: bool = False) -> LayersKey:
        assert self._tiling is not None, "other operators capture runs"
        num_slices = self._mesh.bp_size if is_cut else 1
        return LayersKey(num_tokens, self._tiling.room(num_tokens), (), is_captured=True, num_slices=num_slices)

    def reads_key(self, num_reads: int, sampling: Sampling, *, is_captured: bool) -> ReadsKey:
        padded = fit(num_reads, self.buckets.reads) if is_captured and not sampling.is_special else None
        return ReadsKey(padded or self._aligned(max(1, num_reads)), sampling, is_captured=padded is not None)

    def _cut(self, plan: StepPlan) -> tuple[list[Share], LayersKey]:
        num_ranks, sizes = self._mesh.bp_size, self.slices
        length = slice_length(plan, num_ranks)
        for size in sizes[bisect_left(sizes, length) :]:
            key, shares = self.captured_key(size, is_cut=True), cut(plan, num_ranks, size)
            if self._num_tiles(shares, size) <= key.num_tiles:
                return shares, key
        length = self._aligned(length)
        shares = cut(plan, num_ranks, length)
        return shares, self._key_as_it_is(shares, length, num_ranks)

    def _aligned(self, num_tokens: int) -> int:
        """Of a pass that runs as it is: kernels are compiled for sizes that 16 divides."""
        return round_up(num_tokens, 16) if self._captures else num_tokens

    def _num_tiles(self, shares: list[Share], num_tokens: int) -> int:
        tiling = self._tiling
        return max(tiling.needed(share.spans_6R[1], num_tokens) for share in shares) if tiling is not None else 0

    def _key_as_it_is(self, shares: list[Share], num_tokens: int, num_slices: int = 1) -> LayersKey:
        runs = runs_of(shares[self._mesh.bp_rank], num_tokens) if self._tiling is None else ()
        num_tiles = self._num_tiles(shares, num_tokens)
        return LayersKey(num_tokens, num_tiles, runs, is_captured=False, num_slices=num_slices)
