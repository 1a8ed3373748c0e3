"""Which row holds which page of KV memory: host bookkeeping of one rank over the pool of `common.runtime`, no tensors.

Under block-causal attention the KV of a finished block is the same in every branch. So the pages that a request has
filled with committed positions are shared by all its rows, and by other requests that begin alike. Each row has a
private *tail*: the partly committed page and the pages of its window. Every step writes the whole window into each
row's tail. When a span commits, each row of that step already holds it: pages that are now full become shared by
changing hands, and nothing is copied. Only a row that joins later gets a copy of the one partly committed page.

Page 0 is the dummy page, and `PageBook.dummy_slots` takes more when one is not enough: what has to be written but must
never be read goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.config import DecodeConfig
from common.decoding import Int, Room, StepPlan
from common.errors import EngineError
from common.runtime import NO_SLOT, PagedCapacity, PagePool, PrefixCache, slots_going_on
from common.runtime import pages_for as pages_of_size

PAGE_SIZE = 128  # positions; the smallest that Ascend's paged attention takes


def pages_for(num_positions: int) -> int:
    return pages_of_size(num_positions, PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class BranchCapacity(PagedCapacity):
    """Every row of a request has pages of its own, and what must never be read lies in dummy pages."""

    num_branch_ranks: int = 1

    def why_refused(self, decode: DecodeConfig) -> str | None:
        return PagedCapacity.why_refused(self, decode) or why_not_decoded(decode)

    def num_reserved(self, rooms: Sequence[Room]) -> int:
        needed = sum(most_pages(room, self.num_branch_ranks) for room in rooms)
        num_dummies = sum(most_shift_entries(room.decode, self.num_branch_ranks) for room in rooms)
        return needed + max(1, pages_for(num_dummies))


def why_not_decoded(decode: DecodeConfig) -> str | None:
    """Why these pages cannot hold what a request wants cached; None: they can."""
    if decode.strategy.cached == "dual":
        return (
            "cache dual keeps KV that differs from branch to branch and changes before it is final, and branches of "
            "engine lopa_ascend exchange none: set cache to prefix"
        )
    return None


def most_rows(decode: DecodeConfig, num_branch_ranks: int) -> int:
    """Rows of one request on one rank: branches are dealt round robin."""
    return -(-(decode.num_lookahead + 1) // num_branch_ranks)


def most_pages(room: Room, num_branch_ranks: int) -> int:
    """Most pages of one request at any time: the full pages that its first step commits once, all later ones once a
    row."""
    shared = _committed_first(room) // PAGE_SIZE
    private = pages_for(room.num_positions) - shared
    return shared + most_rows(room.decode, num_branch_ranks) * private


def _committed_first(room: Room) -> int:
    """Positions of the prompt that become final in the first step: whole blocks, where they are counted from 0."""
    length, decode = room
    if decode.strategy.cached == "none":
        return 0
    return length // decode.block_size * decode.block_size if decode.strategy.is_from_zero else length


def most_shift_entries(decode: DecodeConfig, num_branch_ranks: int) -> int:
    if decode.shift_row == "stale" or decode.strategy.is_from_zero:
        return 0
    return most_rows(decode, num_branch_ranks) * (decode.max_new_tokens // decode.block_size)


@dataclass(frozen=True, slots=True)
class RequestPages:
    """One request on this rank. Every tail holds the committed part of its first page.

    num_rows: tails that the current step writes; the others are as good until something commits.
    """

    num_committed: int = 0
    shared: tuple[int, ...] = ()
    tails: tuple[tuple[int, ...], ...] = ()
    num_rows: int = 0

    def committed(self, length: int) -> RequestPages:
        """The state once `length` more positions are final: full pages are shared, rows that did not write them are
        gone."""
        end = self.num_committed + length
        num_full = end // PAGE_SIZE - len(self.shared)
        written = self.tails[: self.num_rows]
        assert written, "a rank computes at least one row of a request that commits"
        tails = tuple(tail[num_full:] for tail in written)
        return RequestPages(end, self.shared + written[0][:num_full], tails, self.num_rows)

    @property
    def pages(self) -> set[int]:
        return set(self.shared).union(*self.tails)


@dataclass(frozen=True, slots=True)
class RowPages:
    """Pages of this rank's rows in one step: [rows, P], unused columns 0. copies: (from, to), before the step."""

    table_RP: Int
    copies: list[tuple[int, int]] = field(default_factory=list)


class PageBook:
    """The pages of all requests of this rank, step by step."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.prefixes = PrefixCache(self, pool, PAGE_SIZE)
        self._begun: set[int] = set()  # slots whose request is not in a plan yet
        self._requests: dict[int, RequestPages] = {}
        self._prepared: dict[int, RequestPages] = {}
        self._dummies = [pool.take(NO_SLOT)]
        assert self._dummies == [0], "the dummy page is the first: block tables are padded with zeros"
        self._dummy_slots = np.arange(PAGE_SIZE)

    def pages_of(self, slot: int) -> RequestPages:
        return self._requests[slot]

    def begin(self, slot: int, pages: Sequence[int]) -> None:
        self.drop(slot, 0)
        self._begun.add(slot)
        if pages:
            self._requests[slot] = RequestPages(len(pages) * PAGE_SIZE, tuple(pages))

    def page_at(self, slot: int, index: int) -> int:
        return self._requests[slot].shared[index]

    def put_page(self, slot: int, index: int, page: int) -> None:
        held = self._requests[slot]
        self._requests[slot] = replace(held, shared=(*held.shared[:index], page, *held.shared[index + 1 :]))

    def drop(self, slot: int, num_shared: int) -> None:
        held = self._requests.pop(slot, RequestPages())
        self.pool.give_back(slot, sorted(held.pages - set(held.shared[:num_shared])))

    def open_step(self, plan: StepPlan, rows: Int) -> RowPages:
        """Give every one of `rows` (of the plan) pages up to its window's end, and forget requests that ended.

        Raises EngineError where the pool runs dry; no page is lost then, and the requests are as they were.
        """
        self._forget_all_but(plan)
        before = dict(self._requests)
        self.pool.undo_from_here()
        try:
            return self._open_step(plan, rows)
        except EngineError:
            self._requests = before
            self.pool.undo()
            raise

    def _open_step(self, plan: StepPlan, rows: Int) -> RowPages:
        slots, starts = plan.slot_R.take(rows).tolist(), plan.start_R.take(rows).tolist()
        lengths = (-((plan.start_R + plan.num_keys_R).take(rows) // -PAGE_SIZE)).tolist()  # in pages
        places_of: dict[int, list[int]] = {}
        for place, slot in enumerate(slots):
            places_of.setdefault(slot, []).append(place)
        row_pages: list[tuple[int, ...]] = [()] * len(rows)
        copies: list[tuple[int, int]] = []
        for slot, places in places_of.items():
            held = self._requests.get(slot) or self._begin(slot, starts[places[0]])
            assert held.num_committed == starts[places[0]], "a window starts where the committed KV ends"
            held = self._requests[slot] = self._with_tails(slot, held, [lengths[place] for place in places], copies)
            for place, tail in zip(places, held.tails, strict=False):
                row_pages[place] = held.shared + tail
        most = max(map(len, row_pages), default=0)
        padded = [pages + (0,) * (most - len(pages)) for pages in row_pages]
        return RowPages(np.array(padded, dtype=np.int64).reshape(len(rows), most), copies)

    def prepare_commits(self, plan: StepPlan) -> None:
        """Work out the state after this step's commits; nothing changes until `commit`."""
        self._prepared = {span.slot: self._requests[span.slot].committed(span.length) for span in plan.commits}

    def commit(self, *_: object) -> None:
        """Put the prepared pages in force. They hold the same KV whichever row has won, so nobody looks at that."""
        for slot, after in self._prepared.items():
            self.pool.give_back(slot, sorted(self._requests[slot].pages - after.pages))
            self._requests[slot] = after
        self._prepared = {}

    def dummy_slots(self, count: int) -> Int:
        """`count` different slots that nobody reads, for this step."""
        while count > len(self._dummy_slots):
            page = self.pool.take(NO_SLOT)
            self._dummies.append(page)
            slots = np.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            self._dummy_slots = np.concatenate((self._dummy_slots, slots))
        return self._dummy_slots[:count]

    def _forget_all_but(self, plan: StepPlan) -> None:
        if len(self._dummies) > 1:
            self.pool.give_back(NO_SLOT, self._dummies[1:])
            del self._dummies[1:]
            self._dummy_slots = self._dummy_slots[:PAGE_SIZE]
        for slot in self._requests.keys() - slots_going_on(plan) - self._begun:
            self.prefixes.end(slot)
            self.drop(slot, 0)
        self._begun.clear()

    def _begin(self, slot: int, start: int) -> RequestPages:
        """Take in a request. It has its whole prompt in the window; made-up steps of measurements start after zeros."""
        return RequestPages(start, tuple(self.pool.take(slot) for _ in range(start // PAGE_SIZE)))

    def _with_tails(
        self, slot: int, held: RequestPages, lengths: list[int], copies: list[tuple[int, int]]
    ) -> RequestPages:
        """Give each row a tail, so that it has this many pages."""
        num_shared = len(held.shared)
        has_all = all(length <= num_shared + len(tail) for length, tail in zip(lengths, held.tails, strict=False))
        if has_all and held.num_rows == len(lengths):
            return held
        tails = list(held.tails)
        for row, length in enumerate(lengths):
            if row == len(tails):
                tails.append(())
                if row and held.num_committed % PAGE_SIZE:
                    tails[row] = (self.pool.take(slot),)
                    copies.append((tails[0][0], tails[row][0]))
            num_missing = length - num_shared - len(tails[row])
            tails[row] += tuple(self.pool.take(slot) for _ in range(num_missing))
        return replace(held, tails=tuple(tails), num_rows=len(lengths))
