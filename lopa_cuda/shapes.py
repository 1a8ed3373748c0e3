"""Which shape a pass has: rows dealt over the branch ranks or entries cut, padded to a captured size where one fits.

Every rank comes to the same numbers of tokens and tiles, since they depend on the plan alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from common.decoding import Int, Sampling, StepPlan
from common.processes import Mesh
from common.runtime import ReadsKey
from graphs.buckets import Buckets, fit, round_up
from lopa_cuda.steps import LayersKey, Share, Tiling, cut, deal, runs_of, slice_length, slice_sizes, slices_pay


class Shapes:
    """buckets bounds what is captured. tiling: how attention sees rows whose lengths are on the device; None: operators
    take lengths from the host. staged: tokens of the staging memory of captured passes. routing_block: tokens that stay
    together in slices; 1: none need."""

    def __init__(
        self, mesh: Mesh, buckets: Buckets, tiling: Tiling | None, staged: int, *, captures: bool,
        routing_block: int = 1,
    ) -> None:  # fmt: skip
        self.buckets = buckets
        self._mesh = mesh
        self._tiling = tiling
        self._staged = staged
        self._captures = captures
        self._routing_block = routing_block
        self._tiled_key = lru_cache(maxsize=256)(self._find_tiled_key)  # rows are of the same length for several steps

    @property
    def captures_ahead(self) -> bool:
        """Whether a capture depends on its size alone. With operators that take numbers of keys from the host it does
        not."""
        return self._captures and self._tiling is not None

    @property
    def slices(self) -> list[int]:
        """Ascending sizes at which passes that are cut over ranks are captured. None where captures depend on the
        rank's rows: a first run holds collectives, so all ranks must capture at the same steps."""
        if not self.captures_ahead:
            return []
        sizes = slice_sizes(self.buckets.of_prompts, self._mesh.bp_size, self._staged)
        return [size for size in sizes if size % self._routing_block == 0]

    def arranged(self, plan: StepPlan, row_of: Int) -> tuple[list[Share], LayersKey]:
        """Decide what each rank computes, and in which shape."""
        if slices_pay(plan, row_of):
            return self._cut(plan)
        shares = deal(plan, row_of)
        return shares, self.dealt_key(shares)

    def dealt_key(self, shares: list[Share]) -> LayersKey:
        if self._tiling is not None:
            return self._tiled_key(tuple([share.num_entries_R.tobytes() for share in shares]))
        num_tokens = max(share.num_tokens for share in shares)
        padded = fit(num_tokens, self.buckets.tokens) if self._captures else None
        size = padded or self._aligned(num_tokens)
        return LayersKey(size, 0, runs_of(shares[self._mesh.bp_rank], size), is_captured=padded is not None)

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
            if self._num_tiles([share.num_entries_R for share in shares], size) <= key.num_tiles:
                return shares, key
        length = round_up(self._aligned(length), self._routing_block)
        shares = cut(plan, num_ranks, length)
        runs = runs_of(shares[self._mesh.bp_rank], length) if self._tiling is None else ()
        num_tiles = self._num_tiles([share.num_entries_R for share in shares], length)
        return shares, LayersKey(length, num_tiles, runs, is_captured=False, num_slices=num_ranks)

    def _aligned(self, num_tokens: int) -> int:
        """Size of a pass that is not captured: kernels are compiled for multiples of 16."""
        return round_up(num_tokens, 16) if self._captures else num_tokens

    def _find_tiled_key(self, num_entries_PR: tuple[bytes, ...]) -> LayersKey:
        """The smallest captured shape with room for ranks whose rows have so many entries, else a shape of their
        size."""
        lengths_PR = [np.frombuffer(num_entries_R, dtype=np.int64) for num_entries_R in num_entries_PR]
        num_tokens = int(max(length_R.sum() for length_R in lengths_PR))
        sizes = self.buckets.tokens if self._captures else ()
        for size in sizes[bisect_left(sizes, num_tokens) :]:
            key = self.captured_key(size)
            if self._num_tiles(lengths_PR, size) <= key.num_tiles:
                return key
        num_tokens = self._aligned(num_tokens)
        return LayersKey(num_tokens, self._num_tiles(lengths_PR, num_tokens), (), is_captured=False)

    def _num_tiles(self, lengths_PR: Sequence[Int], num_tokens: int) -> int:
        tiling = self._tiling
        return max(tiling.needed(length_R, num_tokens) for length_R in lengths_PR) if tiling is not None else 0
