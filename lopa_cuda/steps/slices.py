"""A pass cut over the branch-parallel ranks by its entries: each computes a slice, and sees the keys of all.

A request's first pass has one row, its prompt. Rows alone cannot be dealt so that the ranks share that work: all of
them would compute it whole. So the plan's entries are cut, whatever rows they are of. The staging memory then holds the
whole plan in its order, one slice after another. In every layer a rank writes its slice of it, on all ranks where they
can (lopa_cuda.parallel.peer_staging), else they gather each other's. Attention then looks at the rows' keys there.
After the pass each rank has all of its KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.decoding import NUM_UPLOADED_FIELDS, Int, RowField, StepPlan
from common.runtime import Collectives
from lopa_cuda.machine import MACHINE
from lopa_cuda.steps.share import Share

LEAST_SAVED = MACHINE.least_saved_tokens  # tokens that the busiest rank must be spared
_MULTIPLE = 16  # what kernels are compiled for


def slices_pay(plan: StepPlan, row_of: Int) -> bool:
    """Whether to cut the plan instead of dealing its rows [P, R] out: where requests have their anchors alone and that
    spares the busiest rank enough."""
    num_ranks = len(row_of)
    if num_ranks == 1 or plan.num_rows > plan.request_R[-1] + 1:
        return False
    most = int(plan.num_entries_R[row_of].sum(axis=1).max())
    return most - slice_length(plan, num_ranks) >= LEAST_SAVED


def slice_length(plan: StepPlan, num_ranks: int) -> int:
    """Entries of one of equal slices."""
    return -(-plan.num_tokens // num_ranks)


def slice_sizes(sizes_up_to: Callable[[int], Sequence[int]], num_ranks: int, num_staged: int) -> list[int]:
    """Sizes of slices that pay and that, all ranks together, fit this many tokens of staging memory. sizes_up_to: the
    padded sizes up to a largest one."""
    largest = num_staged // num_ranks // _MULTIPLE * _MULTIPLE
    return [size for size in sizes_up_to(largest) if size * (num_ranks - 1) >= LEAST_SAVED]


def cut(plan: StepPlan, num_ranks: int, length: int) -> list[Share]:
    """Cut the plan into slices of `length` entries; the last may have fewer."""
    return [_slice(plan, rank * length, length) for rank in range(num_ranks)]


def _slice(plan: StepPlan, first: int, length: int) -> Share:
    # A rank for which nothing is left repeats the last entry, and writes its key where nobody looks.
    first = min(first, plan.num_tokens - 1)
    end = min(first + length, plan.num_tokens)
    end_R = plan.first_R + plan.num_entries_R
    rows = ((plan.first_R < end) & (end_R > first)).nonzero()[0]
    spans_6R, first_key_R = plan.row_fields_8R[:NUM_UPLOADED_FIELDS, rows], plan.first_R[rows]
    begin_R = np.maximum(first_key_R, first)
    spans_6R[RowField.FIRST] = begin_R - first
    spans_6R[RowField.NUM_ENTRIES] = np.minimum(end_R[rows], end) - begin_R
    return Share(spans_6R, np.arange(first, end), end - first, first_key_R)


@dataclass(frozen=True, slots=True)
class StagedSlice:
    """This rank's part of a pass's staging memory, of which `window` is one layer: [2, T, K, H].

    num_tokens: tokens of a slice, padding included. collectives: over the ranks that have the others; None: the pass is
    not cut.
    """

    num_tokens: int
    collectives: Collectives | None

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have other slices."""
        return self.collectives is not None

    def own(self, window_2TKH: Tensor) -> Tensor:
        """The part in which this rank writes the keys and values of its tokens."""
        first = self.collectives.mesh.bp_rank * self.num_tokens if self.collectives else 0
        return window_2TKH[:, first : first + self.num_tokens]

    def gather(self, window_2TKH: Tensor) -> None:
        """Fetch what the other ranks have written in their parts."""
        if self.collectives is None:
            return
        for part_TKH in window_2TKH[:, : self.collectives.mesh.bp_size * self.num_tokens]:
            self.collectives.bp_fill(part_TKH)
