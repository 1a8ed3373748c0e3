"""What a step reads on the device and what comes back: host memory that the engine fills, and its device copy.

Captured graphs hold addresses, so their buffers are made once, for the largest shape; smaller shapes are prefixes of
the same memory. A step that runs as it is gets buffers of its own size.

Shapes: T tokens, V virtual rows, P pages of the longest row, M reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.model import NUM_SAMPLING_FIELDS, Int32, SamplingRows
from lopa_ascend.passes.step import FlatStep

_ALIGNMENT = 128  # int32 values: every array starts at a multiple of 512 bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """num_pages: columns of the block table."""

    num_tokens: int
    num_rows: int
    num_pages: int
    num_reads: int


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """int32, on the device."""

    token_T: Tensor
    position_T: Tensor
    slot_T: Tensor
    table_VP: Tensor


class StepBuffers:
    """One host block, one copy to the device."""

    def __init__(self, largest: Sizes, device: torch.device) -> None:
        counts = (*[largest.num_tokens] * 3, largest.num_rows * largest.num_pages, largest.num_reads)
        starts = np.cumsum([0, *(-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts)]).tolist()
        self._host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type != "cpu")
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._num_pages = largest.num_pages
        spans = [slice(start, start + count) for start, count in zip(starts, counts, strict=False)]
        host = self._host.numpy()
        self._entries_3T = host[: starts[3]].reshape(3, -1)
        self._table_VP = host[spans[3]].reshape(largest.num_rows, largest.num_pages)
        self._read_M = host[spans[4]]
        self._device_parts = [self._device[span] for span in spans]

    def fill(self, flat: FlatStep) -> None:
        """What a step does not fill stays as it was: nothing looks at it, except padded reads, which are zeroed."""
        self._entries_3T[:, : flat.num_tokens] = flat.entries_3T
        num_rows, num_pages = flat.table_VP.shape
        self._table_VP[:num_rows, :num_pages] = flat.table_VP
        self._table_VP[:num_rows, num_pages:] = 0
        self._read_M[: len(flat.read_M)] = flat.read_M
        self._read_M[len(flat.read_M) :] = 0

    def send(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def step(self, sizes: Sizes) -> DeviceStep:
        *tokens, table, _ = self._device_parts
        table_VP = table[: sizes.num_rows * self._num_pages].view(sizes.num_rows, self._num_pages)
        return DeviceStep(*(part[: sizes.num_tokens] for part in tokens), table_VP)

    def reads(self, num_reads: int) -> Tensor:
        """int32 [M]: tokens whose state goes to the head."""
        return self._device_parts[-1][:num_reads]


class ReadBuffers:
    """hidden_MD: the states that go through the head. rows: how they are drawn, where they are; predicted_PM3: what
    comes of it, of all branch ranks, on the host."""

    def __init__(
        self, num_reads: int, num_ranks: int, width: int, dtype: torch.dtype, device: torch.device, *, is_sampled: bool
    ) -> None:
        self.hidden_MD = torch.zeros((num_reads, width), dtype=dtype, device=device)
        shape = num_ranks, num_reads, 3
        self.predicted_PM3 = torch.zeros(shape, device=device)
        self.host_PM3 = self.predicted_PM3
        is_pinned = device.type != "cpu"
        if is_pinned:
            self.host_PM3 = torch.zeros(shape, pin_memory=True)
        num_fields = NUM_SAMPLING_FIELDS if is_sampled else 0
        self._fields = torch.ones((num_fields, num_reads), dtype=torch.int32, pin_memory=is_pinned)
        self._fields_on_device = self._fields.to(device) if is_pinned else self._fields
        self.rows = SamplingRows.of(self._fields_on_device) if is_sampled else None

    def send(self, fields_6M: Int32) -> None:
        """How these reads are drawn (common.model.sampling_fields)."""
        self._fields.numpy()[:] = fields_6M
        if self._fields_on_device is not self._fields:
            self._fields_on_device.copy_(self._fields, non_blocking=True)

    def receive(self) -> None:
        """Queue the copy to the host."""
        if self.host_PM3 is not self.predicted_PM3:
            self.host_PM3.copy_(self.predicted_PM3, non_blocking=True)
