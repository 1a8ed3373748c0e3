"""The buffers of one pass, through the layers and through the head: what the host fills and the device reads.

Tokens are padded to the shape of the buffers. Padding is one more row without cache whose entries see its first key:
it computes something finite that nobody looks at. A padding read repeats the first token.

Shapes: T tokens, N tiles, M reads of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common import runtime
from common.decoding import Bool, Int, StepPlan
from common.runtime import ReadsKey, Upload
from lopa_cuda.steps.share import Share
from lopa_cuda.steps.slices import StagedSlice
from lopa_cuda.steps.tiles import RECORD, Tiling, write_tiles

_UNBOUNDED = int(np.iinfo(np.int32).max)


class Run(NamedTuple):
    """Adjacent rows that have everything but their tokens in common, for operators that take no lengths from the
    device. The names are StepPlan's; first_key is a Share's."""

    num_rows: int
    num_entries: int
    num_keys: int
    start: int
    cached: int
    slot: int
    first_key: int | None = None


class LayersKey(NamedTuple):
    """The shape of a pass through the layers. runs: empty for operators that take lengths from the device; num_tiles:
    0 for others. num_slices: ranks over which the pass is cut (lopa_cuda.steps.slices)."""

    num_tokens: int
    num_tiles: int
    runs: tuple[Run, ...]
    is_captured: bool
    num_slices: int = 1

    @property
    def num_staged(self) -> int:
        """Tokens of the staging memory."""
        return self.num_slices * self.num_tokens


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """This rank's rows on the device, int32. tiles_N8: see lopa_cuda.steps.tiles. runs: padding included. staged: where
    their keys and values go."""

    position_T: Tensor
    horizon_T: Tensor
    tiles_N8: Tensor
    runs: tuple[Run, ...]
    staged: StagedSlice


class StepBuffers:
    """One host block, one copy to the device: a record of every tile, then three values of every token."""

    def __init__(self, key: LayersKey, device: torch.device, tiling: Tiling | None, staged: StagedSlice) -> None:
        tiles = RECORD * key.num_tiles
        num_values = tiles + 3 * key.num_tokens
        self._block = Upload(num_values, device)
        self._tiling = tiling
        host, block = self._block.host, self._block.device
        self._tiles_N8 = host[:tiles].reshape(-1, RECORD)
        self._entries_3T = host[tiles:].reshape(3, -1)
        self._entries_3T[2] = _UNBOUNDED
        self._spans: bytes | None = None  # rows whose padding and tiles lie in the block, if spans decide them
        self.token_T, position_T, horizon_T = block[tiles:].view(3, -1).unbind()
        self.step = DeviceStep(position_T, horizon_T, block[:tiles].view(-1, RECORD), key.runs, staged)

    def fill(self, plan: StepPlan, share: Share) -> None:
        """Write this share of the plan into the host block, but for what the step before has left there."""
        num_tokens = share.num_tokens
        self._entries_3T[:, :num_tokens] = share.of_entries(plan.entries_3T)
        spans = share.spans_6R.tobytes() if share.first_key_R is None else None
        if spans is None or spans != self._spans:
            self._fill_tiles(share)
            self._spans = spans

    def _fill_tiles(self, share: Share) -> None:
        """Write what the spans of the rows decide: padding, and the record of every tile."""
        num_tokens, num_padded = share.num_tokens, self._entries_3T.shape[1]
        if num_tokens < num_padded:
            self._entries_3T[:2, num_tokens:] = 0
            self._entries_3T[2, num_tokens:] = _UNBOUNDED
        if self._tiling is not None:
            write_tiles(self._tiles_N8, self._tiling, share.spans_6R, num_padded, share.first_key_R)

    def send(self) -> None:
        self._block.send()


class ReadBuffers(runtime.ReadBuffers):
    """index_M: tokens whose hidden states are read. logits_MV: this shard's logits of the last run, until the next run
    of any shape; None where the pass is special.

    guide_M, lowered_M: StepPlan.changes_2T where the pass is special; entries that guide are counted in the plan, which
    a single branch rank computes in its order.
    """

    def __init__(self, key: ReadsKey, device: torch.device, num_ranks: int) -> None:
        self._index = Upload(key.num_reads, device)
        self.index_M = self._index.device
        self.logits_MV: Tensor | None = None
        super().__init__(key, device, num_ranks)
        self._changes = Upload((2 if key.sampling.is_special else 0, key.num_reads), device)
        if key.sampling.is_special:
            self.guide_M, self.lowered_M = self._changes.device.unbind()

    def fill(self, plan: StepPlan, tokens_M: Int, entries_M: Int) -> None:
        """Take this rank's reads. tokens_M: counted in its share; entries_M: the same in the plan."""
        self._index.host[: len(tokens_M)] = tokens_M
        self._index.host[len(tokens_M) :] = 0
        self.fill_sampling(plan, entries_M)
        if plan.changes_2T is not None:
            self._changes.host[:, : len(tokens_M)] = plan.changes_2T[:, entries_M]

    def send(self) -> None:
        self._index.send()
        if self._changes.host.size:
            self._changes.send()
        if self.sampling_rows is not None:
            self._sampling.send()


def in_whole_blocks(is_read_T: Bool, routing_block: int) -> Bool:
    """Mark all of a block of which something is read: with experts chosen by blocks, what the last layer computes of a
    token depends on the others. Rows are made of whole blocks, but for those of made-up plans."""
    if routing_block == 1:
        return is_read_T
    num_tokens = len(is_read_T)
    blocks_NB = np.pad(is_read_T, (0, -num_tokens % routing_block)).reshape(-1, routing_block)
    found_T: Bool = blocks_NB.any(axis=1).repeat(routing_block)[:num_tokens]
    return found_T


def runs_of(share: Share, num_tokens: int) -> tuple[Run, ...]:
    """Runs of these rows, and of padding up to `num_tokens`."""
    rows = map(tuple, share.spans_6R[1:].T.tolist())
    if share.first_key_R is None:
        runs = [Run(len(list(same)), *alike) for alike, same in groupby(rows)]
    else:
        runs = [Run(1, *row, first_key) for row, first_key in zip(rows, share.first_key_R.tolist(), strict=True)]
    padding = Run(1, num_tokens - share.num_tokens, 1, 0, 0, 0, None if share.first_key_R is None else 0)
    return (*runs, padding) if padding.num_entries else tuple(runs)
