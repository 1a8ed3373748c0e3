"""Which shape a pass has: padded to what is captured, where that fits.

Every rank comes to the same numbers of tokens and tiles, since they depend on the plan alone.
"""

from __future__ import annotations

from bisect import bisect_left

from common.decoding import Sampling
from common.processes import Mesh
from graphs.buckets import Buckets, fit, round_up
from lopa_cuda.steps import LayersKey, ReadsKey, Share, Tiling, runs_of


class Shapes:
    """buckets bounds what is captured. tiling: of operators that take lengths from the device; None: of others."""

    def __init__(self, mesh: Mesh, buckets: Buckets, tiling: Tiling | None, *, captures: bool) -> None:
        self.buckets = buckets
        self._mesh = mesh
        self._tiling = tiling
        self._captures = captures

    @property
    def captures_ahead(self) -> bool:
        """Whether a size is all that a capture depends on: operators that look at host numbers of keys make many."""
        return self._captures and self._tiling is not None

    def dealt_key(self, shares: list[Share]) -> LayersKey:
        num_tokens = max(share.num_tokens for share in shares)
        if self._captures:
            for size in self.buckets.tokens[bisect_left(self.buckets.tokens, num_tokens) :]:
                if self._tiling is None:
                    return LayersKey(size, 0, runs_of(shares[self._mesh.bp_rank], size), is_captured=True)
                key = self.captured_key(size)
                if self._num_tiles(shares, size) <= key.num_tiles:
                    return key
        return self._key_as_it_is(shares, self._aligned(num_tokens))

    def captured_key(self, num_tokens: int) -> LayersKey:
        assert self._tiling is not None, "other operators capture runs"
        return LayersKey(num_tokens, self._tiling.room(num_tokens), (), is_captured=True)

    def reads_key(self, num_reads: int, sampling: Sampling, *, is_captured: bool) -> ReadsKey:
        padded = fit(num_reads, self.buckets.reads) if is_captured and not sampling.is_special else None
        return ReadsKey(padded or max(1, num_reads), sampling, is_captured=padded is not None)

    def _aligned(self, num_tokens: int) -> int:
        """Of a pass that runs as it is: kernels are compiled for sizes that 16 divides."""
        return round_up(num_tokens, 16) if self._captures else num_tokens

    def _num_tiles(self, shares: list[Share], num_tokens: int) -> int:
        tiling = self._tiling
        return max(tiling.needed(share.spans_6R[1], num_tokens) for share in shares) if tiling is not None else 0

    def _key_as_it_is(self, shares: list[Share], num_tokens: int) -> LayersKey:
        runs = runs_of(shares[self._mesh.bp_rank], num_tokens) if self._tiling is None else ()
        return LayersKey(num_tokens, self._num_tiles(shares, num_tokens), runs, is_captured=False)
