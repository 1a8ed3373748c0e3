"""The buffers of one forward pass: what the host fills, what the device reads, and where predictions come back.

Rows and reads are padded to the shape of the buffers. Padding computes something finite that nobody looks at: a
padding row has one key and no cache, a padding entry sees its row's window, a padding read repeats the first.

Shapes: R rows of this rank, W entries a row, M reads of a rank, P branch-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.decoding import NUM_UPLOADED_FIELDS, UNBOUNDED, Int, Predictions, Sampling, StepPlan
from common.model import NoiseKeys

_COLUMNS_311 = np.arange(3)[:, None, None]  # token, probability, confidence


class RowsKey(NamedTuple):
    """The shape of a pass through the layers. num_cached: cached keys that operators without device lengths look at."""

    num_rows: int
    width: int
    num_cached: int
    is_captured: bool

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width


class ReadsKey(NamedTuple):
    """The shape of a pass through the head, and what it does with the logits."""

    num_reads: int
    sampling: Sampling
    is_captured: bool


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """This rank's rows on the device, int32. num_cached bounds cached_R; has_one_slot: every row's slot is 0."""

    position_RW: Tensor
    horizon_RW: Tensor
    start_R: Tensor
    num_keys_R: Tensor
    cached_R: Tensor
    slot_R: Tensor
    num_cached: int
    has_one_slot: bool


class RowBuffers:
    """One host block, one copy to the device: three values an entry, four a row."""

    def __init__(self, key: RowsKey, device: torch.device, has_one_slot: bool) -> None:
        num_rows, width = key.num_rows, key.width
        num_entries = num_rows * width
        self._host = torch.zeros(3 * num_entries + 4 * num_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
        host = self._host.numpy()
        self._entries = host[: 3 * num_entries].reshape(3, num_rows, width)  # token, position, horizon
        self._lengths = host[3 * num_entries :].reshape(4, num_rows)  # start, num_keys, cached, slot
        self._flat = host
        self._entries[2] = UNBOUNDED
        self._lengths[1] = 1
        self._padding = host.copy()
        token_RW, position_RW, horizon_RW = self._device[: 3 * num_entries].view(3, num_rows, width).unbind()
        start_R, num_keys_R, cached_R, slot_R = self._device[3 * num_entries :].view(4, num_rows).unbind()
        self.token_T = token_RW.flatten()
        self.step = DeviceStep(
            position_RW, horizon_RW, start_R, num_keys_R, cached_R, slot_R, key.num_cached, has_one_slot
        )

    def fill(self, plan: StepPlan, rows: Int) -> None:
        """Write the plan's `rows` into the host block; what they leave free is padding."""
        if self._entries.shape[1:] != (len(rows), plan.width):
            self._flat[:] = self._padding
        self._entries[:, : len(rows), : plan.width] = plan.entries_3RW[:, rows]
        self._lengths[:, : len(rows)] = plan.row_fields_7R[:NUM_UPLOADED_FIELDS, rows]

    def send(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class Reads:
    """Which entries each rank puts through the head, and where in the plan their predictions belong.

    Made while the device computes, so that little is left to do once it has answered.
    """

    def __init__(self, plan: StepPlan, row_of: Int) -> None:
        """row_of [P, R]: the plan's row computed at each rank's place."""
        self._shape = plan.is_read_RW.shape
        self.rank_N, self.place_N, self.entry_N = np.nonzero(plan.is_read_RW[row_of])
        self.row_N = row_of[self.rank_N, self.place_N]
        count_P = np.bincount(self.rank_N, minlength=row_of.shape[0])
        self.most = int(count_P.max())
        self._column_N = np.arange(len(self.rank_N)) - (count_P.cumsum() - count_P)[self.rank_N]
        self._target_N = self.row_N * self._shape[1] + self.entry_N

    def order(self, num_reads: int) -> None:
        """Ranks answer with `num_reads` predictions each. A row computed on several ranks counts once, from the first:
        of equal targets the last one written stays, so the first goes last."""
        source_N = self.rank_N * num_reads + self._column_N
        source_RW = np.zeros(self._shape, dtype=np.int64)  # whatever stands first, where nothing is read
        source_RW.reshape(-1)[self._target_N[::-1]] = source_N[::-1]
        self._source_3RW = 3 * source_RW + _COLUMNS_311

    def predictions(self, predicted_PM3: np.ndarray) -> Predictions:
        """In the plan's order."""
        return Predictions(predicted_PM3.reshape(-1).take(self._source_3RW))


class ReadBuffers:
    """Indices of the hidden states to read, the keys of their noise, and the gathered predictions on the host."""

    def __init__(self, key: ReadsKey, device: torch.device, num_ranks: int) -> None:
        is_pinned, is_random = device.type == "cuda", key.sampling.temperature > 0
        self._index = Upload(torch.zeros(key.num_reads, dtype=torch.int32, pin_memory=is_pinned), device)
        shape = 3 if is_random else 0, key.num_reads
        self._noise = Upload(torch.zeros(shape, dtype=torch.int64, pin_memory=is_pinned), device)
        self._predicted_PM3 = torch.zeros((num_ranks, key.num_reads, 3), pin_memory=is_pinned)
        self.predicted_PM3 = self._predicted_PM3.numpy()
        self.index_M = self._index.device
        self.noise_keys = NoiseKeys(*self._noise.device.unbind()) if is_random else None

    def fill(self, plan: StepPlan, reads: Reads, rank: int, width: int) -> None:
        """width: entries a row in the hidden states."""
        own = reads.rank_N == rank
        index_N = reads.place_N[own] * width + reads.entry_N[own]
        self._index.host[: len(index_N)] = index_N
        self._index.host[len(index_N) :] = 0
        if self.noise_keys is not None:
            row_N, entry_N = reads.row_N[own], reads.entry_N[own]
            position_N = plan.position_RW[row_N, entry_N] + 1
            self._noise.host[:, : len(index_N)] = plan.noise_key_R[row_N], plan.step_R[row_N], position_N

    def send(self) -> None:
        self._index.send()
        if self.noise_keys is not None:
            self._noise.send()

    def receive(self, predicted_PM3: Tensor) -> None:
        """Copy to the host; it is there once the device has come this far."""
        self._predicted_PM3.copy_(predicted_PM3, non_blocking=True)


class Upload:
    """A host tensor (as numpy) and its copy on the device; the same memory on CPU."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host = host
        self.host = host.numpy()
        self.device = host if device.type == "cpu" else torch.zeros_like(host, device=device)

    def send(self) -> None:
        if self.device is not self._host:
            self.device.copy_(self._host, non_blocking=True)
