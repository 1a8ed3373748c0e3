"""The buffers of one pass through the layers: what the host fills and the device reads.

Tokens are padded to the shape of the buffers. Padding is one more row without cache whose entries see its first key:
it computes something finite that nobody looks at.

Shapes: T tokens, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.decoding import StepPlan
from lopa_cuda.steps.share import Share
from lopa_cuda.steps.tiles import RECORD, Tiling, write_tiles
from lopa_cuda.steps.upload import Upload

_UNBOUNDED = int(np.iinfo(np.int32).max)


class Run(NamedTuple):
    """Rows behind one another that have everything but their tokens in common: what operators look at that take no
    lengths from the device. The names are StepPlan's."""

    num_rows: int
    num_entries: int
    num_keys: int
    start: int
    cached: int
    slot: int


class LayersKey(NamedTuple):
    """The shape of a pass through the layers. runs: empty for operators that take lengths from the device; num_tiles:
    0 for others."""

    num_tokens: int
    num_tiles: int
    runs: tuple[Run, ...]
    is_captured: bool


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """This rank's rows on the device, int32. tiles_N8: see lopa_cuda.steps.tiles. runs: padding included."""

    position_T: Tensor
    horizon_T: Tensor
    tiles_N8: Tensor
    runs: tuple[Run, ...]


class StepBuffers:
    """One host block, one copy to the device: a record of every tile, then three values of every token."""

    def __init__(self, key: LayersKey, device: torch.device, tiling: Tiling | None) -> None:
        tiles = RECORD * key.num_tiles
        num_values = tiles + 3 * key.num_tokens
        self._block = Upload(torch.zeros(num_values, dtype=torch.int32, pin_memory=device.type == "cuda"), device)
        self._tiling = tiling
        host, block = self._block.host, self._block.device
        self._tiles_N8 = host[:tiles].reshape(-1, RECORD)
        self._entries_3T = host[tiles:].reshape(3, -1)
        self._entries_3T[2] = _UNBOUNDED
        self.token_T, position_T, horizon_T = block[tiles:].view(3, -1).unbind()
        self.step = DeviceStep(position_T, horizon_T, block[:tiles].view(-1, RECORD), key.runs)

    def fill(self, plan: StepPlan, share: Share) -> None:
        """Write this share of the plan into the host block, and padding behind it."""
        num_tokens = share.num_tokens
        self._entries_3T[:, :num_tokens] = share.of_entries(plan.entries_3T)
        if num_tokens < self._entries_3T.shape[1]:
            self._entries_3T[:2, num_tokens:] = 0
            self._entries_3T[2, num_tokens:] = _UNBOUNDED
        if self._tiling is not None:
            write_tiles(self._tiles_N8, self._tiling, share.spans_6R, self._entries_3T.shape[1])

    def send(self) -> None:
        self._block.send()


def runs_of(share: Share, num_tokens: int) -> tuple[Run, ...]:
    """Of these rows, and of padding up to `num_tokens`."""
    runs = [Run(len(list(rows)), *alike) for alike, rows in groupby(map(tuple, share.spans_6R[1:].T.tolist()))]
    num_padding = num_tokens - share.num_tokens
    return (*runs, Run(1, num_padding, 1, 0, 0, 0)) if num_padding else tuple(runs)
