"""The pages of one rank's KV memory: each is free, belongs to one slot, or to the cache of prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.decoding import Capacity, Room, StepPlan
from common.errors import EngineError

NO_SLOT = -1  # owner of pages that belong to no request
CACHED = -2  # of those that may be several requests'


class PagePool:
    """Pages 0 to num_pages - 1. The page that was given back last is taken next. num_idle: cached ones that no request
    uses."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.most_used = self.num_idle = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._slot_of_page: list[int | None] = [None] * num_pages
        self._taken: list[tuple[int, int]] | None = None  # (slot, page) since `undo_from_here`

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free) - self.num_idle

    def take(self, slot: int) -> int:
        """Take a page. Raises EngineError if none is free, which admission by Capacity.can_hold rules out."""
        if not self._free:
            raise EngineError(
                f"all {self.num_pages} KV pages are in use: admit requests by Capacity.can_hold, or lower "
                "max_num_requests"
            )
        page = self._free.pop()
        self._slot_of_page[page] = slot
        if self._taken is not None:
            self._taken.append((slot, page))
        self.most_used = max(self.most_used, self.num_used)
        return page

    def give_back(self, slot: int, pages: Sequence[int]) -> None:
        """Give pages back. To give back pages that are free, or another slot's, is a defect."""
        for page in pages:
            owner = self._slot_of_page[page]
            assert owner is not None, f"page {page} was given back twice"
            assert owner == slot, f"page {page} is slot {owner}'s: slot {slot} cannot give it back"
            self._slot_of_page[page] = None
            self._free.append(page)

    def hand_over(self, slot: int, page: int, to: int) -> None:
        """Make a slot's page another owner's."""
        assert self._slot_of_page[page] == slot, f"page {page} is not slot {slot}'s: it cannot hand it over"
        self._slot_of_page[page] = to

    def undo_from_here(self) -> None:
        """Note what is taken, for `undo`. Nothing is noted before the first call."""
        self._taken = []

    def undo(self) -> None:
        """Give back what was taken since `undo_from_here`, which nobody else may have given back."""
        for slot, page in self._taken or ():
            self.give_back(slot, [page])
        self._taken = []


def slots_going_on(plan: StepPlan) -> set[int]:
    """Slots whose request has had a pass before. Pages of any other slot are those of a request that has ended."""
    return set(plan.slot_R[plan.step_R > 0].tolist())


def pages_for(num_positions: int, page_size: int) -> int:
    return -(-num_positions // page_size)


@dataclass(frozen=True, slots=True)
class PagedCapacity(Capacity):
    """Requests share the pages of one pool. Each is admitted with the most it can come to need, so that the pool never
    runs dry while it is decoded."""

    num_pages: int = 0
    page_size: int = field(default=1, kw_only=True)

    def can_hold(self, rooms: Sequence[Room]) -> bool:
        return self.num_reserved(rooms) <= self.num_pages

    def num_spare(self, rooms: Sequence[Room]) -> int:
        return self.num_pages - self.num_reserved(rooms)

    def num_reserved(self, rooms: Sequence[Room]) -> int:
        """Pages that hold whole prompts and canvases."""
        return sum(pages_for(room.num_positions, self.page_size) for room in rooms)
