"""The plain decoding rules under the lookahead branches: D2F, Fast-dLLM, vanilla, each over a whole batch.

A strategy says what a step's window is, which blocks may be filled and when a block's KV becomes final. LoPA's
branches, scores and spawning are the same over all three and live in the other modules.

Shapes: N requests of a batch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from common.decoding.plan import Int
from common.decoding.scheduling.arrays.batch import RequestBatch


class Strategy(Protocol):
    """The plain decoding rule under the lookahead branches."""

    def plan(self, batch: RequestBatch) -> None:
        """Set the windows: start, end, cached, commit and next."""

    def end_of_fillable(self, batch: RequestBatch) -> Int:
        """From first_open up to which block masks may be filled and lookaheads are spawned."""

    def settle(self, batch: RequestBatch) -> None:
        """Move full blocks towards the cache after the winner's fill."""


class PipelinedBlocks:
    """D2F: blocks open while their predecessors are still being filled, and enter the cache one after another."""

    def plan(self, batch: RequestBatch) -> None:
        batch.cached_N[:] = batch.start_N
        _set_bounds(batch)
        np.subtract(batch.next_N, batch.start_N, out=batch.commit_N)

    def end_of_fillable(self, batch: RequestBatch) -> Int:
        return batch.num_blocks_N

    def settle(self, batch: RequestBatch) -> None:
        batch.start_N[:] = batch.next_N
        first_masked_block(batch, out_N=batch.first_open_N)


class OneBlockAtATime:
    """Fast-dLLM: a fixed canvas in blocks decoded in order; one full forward at each block's start rebuilds the
    cache."""

    def plan(self, batch: RequestBatch) -> None:
        _set_bounds(batch)
        is_dual, is_fresh_N = batch.kind.cache == "dual", batch.is_refreshed_N
        batch.start_N[:] = np.where(is_fresh_N, batch.next_N, 0)
        batch.cached_N[:] = np.where(is_fresh_N, batch.end_N if is_dual else batch.next_N, 0)
        batch.commit_N[:] = np.where(is_fresh_N, 0, batch.end_N if is_dual else batch.next_N)
        if is_dual:
            batch.end_N[:] = np.where(is_fresh_N, batch.next_N + batch.kind.block_size, batch.end_N)

    def end_of_fillable(self, batch: RequestBatch) -> Int:
        return np.minimum(batch.first_open_N + 1, batch.num_blocks_N)

    def settle(self, batch: RequestBatch) -> None:
        first_N = first_masked_block(batch)
        batch.is_refreshed_N[:] = first_N == batch.first_open_N
        batch.first_open_N[:] = first_N


class WholeCanvas(OneBlockAtATime):
    """Vanilla: the canvas is one block and nothing is cached; every step forwards the prompt and the canvas."""

    def plan(self, batch: RequestBatch) -> None:
        _set_bounds(batch)
        batch.start_N[:] = batch.cached_N[:] = batch.commit_N[:] = 0
        batch.next_N[:] = batch.prompt_N


def first_masked_block(batch: RequestBatch, out_N: Int | None = None) -> Int:
    """The first block that holds masks; num_blocks where none does, as blocks not opened yet hold nothing else."""
    first_N: Int = batch.num_masked_NM.astype(np.bool_).argmax(axis=1, out=out_N)
    return first_N


def _set_bounds(batch: RequestBatch) -> None:
    """next: where the first open block begins. end: where the last one ends."""
    np.multiply(batch.open_2N, batch.size, out=batch.bounds_2N)
    batch.next_N += batch.origin_N
    batch.end_N += batch.origin_N


STRATEGIES: dict[str, Strategy] = {
    "d2f": PipelinedBlocks(),
    "fast_dllm": OneBlockAtATime(),
    "vanilla": WholeCanvas(),
}
