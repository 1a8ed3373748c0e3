"""How many requests a pool of pages holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.decoding import Capacity, Room


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
