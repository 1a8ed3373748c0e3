"""What a step reads on the device: host memory that the engine fills, and its device copy.

Captured graphs hold addresses, so their buffers are made once, for the largest shape; smaller shapes are prefixes of
the same memory. A step that runs as it is gets buffers of its own size.

Shapes: T tokens, V virtual rows, P pages of the longest row, M reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common import runtime
from common.decoding import Int, StepPlan
from common.runtime import ReadsKey, Upload
from lopa_ascend.steps.layout import FlatStep

_ALIGNMENT = 128  # int32 values: every array starts at a multiple of 512 bytes


class Sizes(NamedTuple):
    """num_rows: virtual rows. num_pages: columns of the block table."""

    num_tokens: int
    num_rows: int
    num_pages: int
    num_reads: int


class LayersKey(NamedTuple):
    """The shape of a pass through the layers."""

    sizes: Sizes
    is_captured: bool

    @property
    def num_tokens(self) -> int:
        return self.sizes.num_tokens


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """This rank's tokens on the device, int32."""

    token_T: Tensor
    position_T: Tensor
    slot_T: Tensor
    table_VP: Tensor


class StepBuffers:
    """One host block, one copy to the device."""

    def __init__(self, largest: Sizes, device: torch.device) -> None:
        counts = (*[largest.num_tokens] * 3, largest.num_rows * largest.num_pages, largest.num_reads)
        starts = np.cumsum([0, *(-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts)]).tolist()
        self._block = Upload(starts[-1], device)
        self._num_pages = largest.num_pages
        spans = [slice(start, start + count) for start, count in zip(starts, counts, strict=False)]
        host = self._block.host
        self._entries_3T = host[: starts[3]].reshape(3, -1)
        self._table_VP = host[spans[3]].reshape(largest.num_rows, largest.num_pages)
        self._read_M = host[spans[4]]
        self._device_parts = [self._block.device[span] for span in spans]

    def fill(self, flat: FlatStep) -> None:
        """Write a step into the host block. What it does not fill stays as it was: nothing looks at it, except padded
        reads, which are zeroed."""
        self._entries_3T[:, : flat.num_tokens] = flat.entries_3T
        num_rows, num_pages = flat.table_VP.shape
        self._table_VP[:num_rows, :num_pages] = flat.table_VP
        self._table_VP[:num_rows, num_pages:] = 0
        self._read_M[: len(flat.read_M)] = flat.read_M
        self._read_M[len(flat.read_M) :] = 0

    def send(self) -> None:
        self._block.send()

    def step(self, sizes: Sizes) -> DeviceStep:
        *tokens, table, _ = self._device_parts
        table_VP = table[: sizes.num_rows * self._num_pages].view(sizes.num_rows, self._num_pages)
        return DeviceStep(*(part[: sizes.num_tokens] for part in tokens), table_VP)

    def reads(self, num_reads: int) -> Tensor:
        """Tokens whose state goes to the head, int32 [M]."""
        return self._device_parts[-1][:num_reads]


class ReadBuffers(runtime.ReadBuffers):
    """hidden_MD: the states that go through the head. gathered_PM3: what comes of them, of all branch ranks, on the
    device."""

    def __init__(
        self, key: ReadsKey, device: torch.device, num_ranks: int, width: int, dtype: torch.dtype
    ) -> None:  # fmt: skip
        self.hidden_MD = torch.zeros((key.num_reads, width), dtype=dtype, device=device)
        self.gathered_PM3 = torch.zeros((num_ranks, key.num_reads, key.sampling.num_values), device=device)
        super().__init__(key, device, num_ranks)
        if self.sampling_rows is not None:
            self._sampling.host[:] = 1  # a capture draws by these
            self._sampling.send()

    def send_sampling(self, plan: StepPlan, entry_M: Int) -> None:
        """Send how these entries of the plan are drawn, if any is."""
        if self.sampling_rows is not None:
            self.fill_sampling(plan, entry_M)
            self._sampling.send()
