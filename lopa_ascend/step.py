"""A step as the device computes it: this rank's rows flattened into tokens, grouped by what they may see.

StepPlan (rows, padded) -> lay_out -> FlatStep (tokens, slots, virtual rows) -> upload -> DeviceStep. Padding is dropped
here, and so are shift entries whose prediction nobody reads. Predictions come back by `Reads`, which every rank derives
from the plan for all ranks, so that nobody has to send along what belongs where.

Shapes: T tokens, V virtual rows, P pages of the longest row, M reads of a rank, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.plan import Int, Predictions, StepPlan, assign_rows
from common.sampling import NoiseKeys
from lopa_ascend.ops import VirtualRows, group_queries
from lopa_ascend.pages import PAGE_SIZE, PageBook

_ALIGNMENT = 128  # int32 values: every array of an upload starts at a multiple of 512 bytes


@dataclass(frozen=True, slots=True)
class FlatStep:
    """read_M: tokens that go through the head. copies: pages (from, to) to copy before the step."""

    token_T: Int
    position_T: Int
    slot_T: Int
    table_VP: Int
    query_ends: list[int]
    kv_lengths: list[int]
    read_M: Int
    copies: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What the model's stages read, on the device, int32."""

    token_T: Tensor
    position_T: Tensor
    slot_T: Tensor
    read_M: Tensor
    rows: VirtualRows


def rows_by_rank(plan: StepPlan, num_ranks: int) -> list[Int]:
    """The plan's rows that each branch-parallel rank computes, ascending; none twice, so none has to be padded away."""
    return [np.unique(hand) for hand in assign_rows(plan, num_ranks)]


def lay_out(plan: StepPlan, rows: Int, book: PageBook) -> FlatStep:
    """Flatten `rows` of the plan; pages are taken from the book."""
    entry_W = np.arange(plan.width)
    is_key_RW = entry_W < plan.num_keys_R[rows, None]
    is_read_RW = plan.is_read_RW[rows]
    is_used_RW = is_key_RW | (is_read_RW & (entry_W < plan.num_entries_R[rows, None]))
    row_T, entry_T = np.nonzero(is_used_RW)
    end_R = (plan.start_R + plan.num_keys_R)[rows]
    # A row that has not opened a block has no keys where others of its request already see some.
    groups = group_queries(row_T, np.minimum(plan.horizon_RW[rows[row_T], entry_T], end_R[row_T]))
    row_T, entry_T = row_T[groups.order_T], entry_T[groups.order_T]
    pages = book.open_step(plan, rows)
    position_T = plan.position_RW[rows[row_T], entry_T]
    slot_T = pages.table_RP[row_T, position_T // PAGE_SIZE] * PAGE_SIZE + position_T % PAGE_SIZE
    is_extra_T = ~is_key_RW[row_T, entry_T]
    slot_T[is_extra_T] = book.dummy_slots(int(is_extra_T.sum()))
    token_of_RW = np.empty(is_used_RW.shape, dtype=np.int64)
    token_of_RW[row_T, entry_T] = np.arange(len(row_T))
    return FlatStep(
        token_T=plan.token_RW[rows[row_T], entry_T],
        position_T=position_T,
        slot_T=slot_T,
        table_VP=pages.table_RP[groups.row_V],
        query_ends=groups.query_ends,
        kv_lengths=groups.kv_lengths,
        read_M=token_of_RW[is_read_RW],
        copies=pages.copies,
    )


class Reads:
    """Which entries each rank puts through the head, in the order of its rows, and where their predictions belong."""

    def __init__(self, plan: StepPlan, rows_of: list[Int]) -> None:
        found = [np.nonzero(plan.is_read_RW[rows]) for rows in rows_of]
        self._shape = plan.token_RW.shape
        self._places = [(rows[place], entry) for rows, (place, entry) in zip(rows_of, found, strict=True)]
        self.most = max(1, *(len(entry) for _, entry in self._places))

    def predictions(self, predicted_PM3: np.ndarray) -> Predictions:
        """In the plan's order; a row computed on several ranks counts once, from the first."""
        predicted = np.zeros((*self._shape, 3), dtype=np.float32)
        for rank in reversed(range(len(self._places))):
            place = self._places[rank]
            predicted[place] = predicted_PM3[rank, : len(place[0])]
        return Predictions(predicted[..., 0].astype(np.int64), predicted[..., 1], predicted[..., 2])

    def noise_keys(self, plan: StepPlan, rank: int) -> np.ndarray:
        """[3, most] int64: request, step and position of each prediction of this rank."""
        row_M, entry_M = self._places[rank]
        keys = np.zeros((3, self.most), dtype=np.int64)
        keys[:, : len(row_M)] = plan.noise_key_R[row_M], plan.step_R[row_M], plan.position_RW[row_M, entry_M] + 1
        return keys


def upload(flat: FlatStep, num_reads: int, device: torch.device) -> DeviceStep:
    """One copy to the device for everything a step needs. Reads are padded to `num_reads` with the first token."""
    read_M = np.zeros(num_reads, dtype=np.int64)
    read_M[: len(flat.read_M)] = flat.read_M
    arrays = (flat.token_T, flat.position_T, flat.slot_T, read_M, flat.table_VP)
    starts = np.cumsum([0, *(-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays)])
    block = torch.zeros(int(starts[-1]), dtype=torch.int32, pin_memory=device.type != "cpu")
    packed = block.numpy()
    for start, array in zip(starts.tolist(), arrays, strict=False):
        packed[start : start + array.size] = array.flatten()
    on_device = block.to(device, non_blocking=True)
    token_T, position_T, slot_T, read_M_, table_VP = (
        on_device[start : start + array.size].view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    )
    rows = VirtualRows(table_VP, flat.query_ends, flat.kv_lengths)
    return DeviceStep(token_T, position_T, slot_T, read_M_, rows)


def upload_noise_keys(keys_3M: np.ndarray, device: torch.device) -> NoiseKeys:
    return NoiseKeys(*torch.from_numpy(keys_3M).to(device).unbind())
