"""Which pages hold a slot's committed positions: a table with one line for each slot.

A request takes pages when positions of it become final, and a device reads the table before the next pass. Requests
that have ended give theirs back. The first of a slot's pages may be other slots' too (`prefixes`).

Shapes: S slots, P pages of a slot, N positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.decoding import CommitSpan, Int, StepPlan
from common.runtime.paging.pool import PagePool, pages_for, slots_going_on
from common.runtime.paging.prefixes import PrefixCache


class PageTable:
    """rows_SP: int32 memory that the table writes: page p of slot s holds positions [p * page_size, (p + 1) *
    page_size) of its request. After a slot's last page any number may stand."""

    def __init__(self, pool: PagePool, rows_SP: npt.NDArray[np.int32], page_size: int) -> None:
        self.pool = pool
        self.prefixes = PrefixCache(self, pool, page_size)
        self.rows_SP = rows_SP
        self._page_size = page_size
        self._num_pages = [0] * rows_SP.shape[0]
        self._begun: set[int] = set()  # slots whose request is not in a plan yet
        self._positions: dict[CommitSpan, Int] = {}
        self._has_changed = False

    def pages_of(self, slot: int) -> list[int]:
        pages: list[int] = self.rows_SP[slot, : self._num_pages[slot]].tolist()
        return pages

    def begin(self, slot: int, pages: Sequence[int]) -> None:
        self._shorten(slot, 0)
        self.rows_SP[slot, : len(pages)] = pages
        self._num_pages[slot] = len(pages)
        self._has_changed |= bool(pages)
        self._begun.add(slot)

    def page_at(self, slot: int, index: int) -> int:
        return int(self.rows_SP[slot, index])

    def put_page(self, slot: int, index: int, page: int) -> None:
        self.rows_SP[slot, index] = page
        self._has_changed = True

    def drop(self, slot: int, num_shared: int) -> None:
        self._shorten(slot, num_shared)
        self._num_pages[slot] = 0

    def open_step(self, plan: StepPlan) -> bool:
        """Forget requests that have ended and take in new ones; return whether the table has changed since the last
        call."""
        if np.count_nonzero(plan.step_R) < plan.num_rows:
            self._begin(plan)
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def prepare_commits(self, plan: StepPlan) -> None:
        """Take the pages of the positions that this step makes final, whoever wins. What the step reads stays as it
        is, so a device may be reading it.

        Raises EngineError where the pool runs dry; no page is lost then.
        """
        self._positions = {}
        if not plan.commits:
            return
        for span in plan.commits:
            has_all = span.start <= self._num_pages[span.slot] * self._page_size
            assert has_all, f"slot {span.slot} has lost its pages: a request that is decoded is in every plan"
            self._extend(span.slot, span.start + span.length)
        lengths, size = [span.length for span in plan.commits], self._page_size
        position_N = np.concatenate([np.arange(span.start, span.start + span.length) for span in plan.commits])
        slot_N = np.array([span.slot for span in plan.commits]).repeat(lengths)
        at_N = self.rows_SP[slot_N, position_N // size].astype(np.int64) * size + position_N % size
        ends = np.cumsum(lengths).tolist()
        self._positions = {span: at_N[end - span.length : end] for span, end in zip(plan.commits, ends, strict=True)}

    def positions(self, span: CommitSpan) -> Int:
        """Where the span's positions lie, counted through all pages."""
        return self._positions[span]

    def _begin(self, plan: StepPlan) -> None:
        """Take in new requests. One has the pages that it began with; made-up steps of measurements start after any
        pages."""
        self._forget_all_but(slots_going_on(plan) | self._begun)
        self._begun.clear()
        rows = np.flatnonzero(plan.step_R == 0)
        for slot, cached in dict(zip(plan.slot_R[rows].tolist(), plan.cached_R[rows].tolist(), strict=True)).items():
            self._shorten(slot, pages_for(cached, self._page_size))
            self._extend(slot, cached)

    def _forget_all_but(self, slots: set[int]) -> None:
        for slot, count in enumerate(self._num_pages):
            if count and slot not in slots:
                self.prefixes.end(slot)
                self._shorten(slot, 0)

    def _shorten(self, slot: int, count: int) -> None:
        """Give back what is more than `count` pages."""
        if self._num_pages[slot] > count:
            self.pool.give_back(slot, self.pages_of(slot)[count:])
            self._num_pages[slot] = count

    def _extend(self, slot: int, num_positions: int) -> None:
        for index in range(self._num_pages[slot], pages_for(num_positions, self._page_size)):
            self.rows_SP[slot, index] = self.pool.take(slot)
            self._num_pages[slot] = index + 1
            self._has_changed = True
