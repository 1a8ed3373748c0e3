"""Which pages hold the KV of which tokens: requests whose prompts begin alike share them.

A page that is full and final belongs to the cache from then on. Its key is the page before it and its own tokens, so
that equal keys mean equal text from position 0 on; contents are compared, not digests alone. Pages in use are counted;
of those in no use the one used longest ago goes first, a page never before those that follow it.

Every rank of a replica is asked the same in the same order and answers alike, though ranks may hold different private
pages: what is kept follows from what requests have reserved, not from what happens to be free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

from common.decoding import Int, PrefixRoot, StepPlan
from common.runtime.paging.pool import CACHED, PagePool

_BYTES = np.dtype(np.int32).itemsize  # of a token in a key
_Key = tuple[object, bytes]  # the page before (a root, or the number of a page), and the tokens


class Holder(Protocol):
    """Knows the pages of each slot, the shared ones first."""

    def begin(self, slot: int, pages: Sequence[int]) -> None:
        """Have a new request begin with these pages of the cache."""

    def page_at(self, slot: int, index: int) -> int: ...

    def put_page(self, slot: int, index: int, page: int) -> None:
        """Have the slot read another page that holds the same."""

    def drop(self, slot: int, num_shared: int) -> None:
        """Forget the slot's request and give back its pages but the first so many, which are the cache's."""


@dataclass(slots=True, eq=False)
class _Page:
    key: _Key
    number: int  # unlike any other's, for the keys of those that follow
    page: int
    num_users: int = 0
    is_known: bool = True  # else nobody finds it any more, and it is free once nobody uses it


@dataclass(slots=True, eq=False)
class _Slot:
    """chain: its first pages. tokens: of final positions after these. length: all final positions."""

    root: PrefixRoot
    prompt: bytes
    chain: list[_Page]
    length: int
    tokens: bytearray = field(default_factory=bytearray)

    @property
    def last(self) -> object:
        """What a page that follows has in its key."""
        return self.chain[-1].number if self.chain else self.root

    @property
    def is_published(self) -> bool:
        """Whether what it finishes can be found."""
        return not self.chain or self.chain[-1].is_known


class PrefixCache:
    """`common.decoding.Prefixes` over a pool of pages."""

    def __init__(self, holder: Holder, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self._holder = holder
        self._page_size = page_size
        self._due: set[int] = set()  # slots with pages that are final and not published
        self._pages: dict[_Key, _Page] = {}
        self._idle: OrderedDict[_Page, None] = OrderedDict()  # in no use, the one to go first comes first
        self._slots: dict[int, _Slot] = {}
        self._num_made = 0

    def match(self, prompt: Sequence[int], root: PrefixRoot) -> int:
        return len(self._found(_usable(prompt, root), root)) * self._page_size

    def is_coming(self, prompt: Sequence[int], root: PrefixRoot) -> bool:
        own, size = _usable(prompt, root), self._page_size * _BYTES
        num_found, most = len(self._found(own, root)), 0
        begin = num_found * size
        for slot in self._slots.values():
            if slot.root == root and len(slot.chain) <= num_found and slot.is_published:
                most = max(most, _num_alike(slot.prompt[begin:], own[begin:], size))
        return 0 < len(own) - begin <= 2 * most * size

    def claim(self, slot: int, prompt: Sequence[int], root: PrefixRoot | None, num_spare: int) -> int:
        self.end(slot)
        chain: list[_Page] = []
        if root is not None and self._page_size % root.block_size == 0:
            chain = self._found(_usable(prompt, root), root)
            self._slots[slot] = _Slot(root, _bytes_of(prompt), chain, len(chain) * self._page_size)
            for page in chain:
                self._use(page)
        self._holder.begin(slot, [page.page for page in chain])
        while len(self._idle) > num_spare:
            self._evict()
        return len(chain) * self._page_size

    def note(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        """Take in what a pass has made final."""
        for span in plan.commits:
            slot = self._slots.get(span.slot)
            if slot is None or not span.is_final:
                continue
            assert span.start == slot.length, "what is final follows what was"
            first = int(plan.first_R[winner_row_of_request[span.request]])
            slot.tokens += plan.token_T[first : first + span.length].tobytes()
            slot.length = span.end
            if len(slot.tokens) >= self._page_size * _BYTES:
                self._due.add(span.slot)

    def end(self, slot: int, is_sound: bool = True) -> None:
        own = self._slots.get(slot)
        if own is None:
            return
        if is_sound:
            self._publish()
        else:
            for page in own.chain:
                self._hide(page)
        del self._slots[slot]
        self._due.discard(slot)
        self._holder.drop(slot, len(own.chain))
        for page in reversed(own.chain):
            self._leave(page)

    def end_all(self) -> None:
        for slot in [*self._slots]:
            self.end(slot)

    def forget(self) -> None:
        for page in self._pages.values():
            page.is_known = False
        self._pages.clear()
        self.end_all()
        while self._idle:
            self._evict()

    def _found(self, prompt: bytes, root: PrefixRoot) -> list[_Page]:
        """Return the first pages that are there, of what a prompt may take."""
        self._publish()
        found: list[_Page] = []
        size, last = self._page_size * _BYTES, cast(object, root)
        for begin in range(0, len(prompt) - size + 1, size):
            page = self._pages.get((last, prompt[begin : begin + size]))
            if page is None:
                break
            found.append(page)
            last = page.number
        return found

    def _publish(self) -> None:
        """Let requests find what has become final."""
        for number in sorted(self._due):
            self._publish_of(number, self._slots[number])
        self._due.clear()

    def _publish_of(self, number: int, slot: _Slot) -> None:
        size = self._page_size * _BYTES
        while len(slot.tokens) >= size and slot.is_published:
            key = slot.last, bytes(slot.tokens[:size])
            del slot.tokens[:size]
            index = len(slot.chain)
            own, known = self._holder.page_at(number, index), self._pages.get(key)
            if known is None:
                self._num_made += 1
                known = self._pages[key] = _Page(key, self._num_made, own)
                self.pool.hand_over(number, own, CACHED)
            else:  # another request has computed the same at the same time
                self._holder.put_page(number, index, known.page)
                self.pool.give_back(number, [own])
            self._use(known)
            slot.chain.append(known)

    def _use(self, page: _Page) -> None:
        page.num_users += 1
        if page in self._idle:
            del self._idle[page]
            self.pool.num_idle -= 1

    def _leave(self, page: _Page) -> None:
        page.num_users -= 1
        if page.num_users:
            return
        if page.is_known:
            self._idle[page] = None
            self.pool.num_idle += 1
        else:
            self.pool.give_back(CACHED, [page.page])

    def _hide(self, page: _Page) -> None:
        page.is_known = False
        if self._pages.get(page.key) is page:
            del self._pages[page.key]

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        self.pool.num_idle -= 1
        self._hide(page)
        self.pool.give_back(CACHED, [page.page])


def _usable(prompt: Sequence[int], root: PrefixRoot) -> bytes:
    """Return what of a prompt may come from the cache: all but the last token of its whole blocks, so that what is left
    takes the pass that it takes without a cache, and random numbers by passes stay as they are."""
    return _bytes_of(prompt[: max(len(prompt) // root.block_size * root.block_size - 1, 0)])


def _bytes_of(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def _num_alike(first: bytes, second: bytes, size: int) -> int:
    """Return how many pieces of so many bytes the two begin with alike."""
    count = 0
    while (piece := first[count * size : (count + 1) * size]) == second[count * size : (count + 1) * size]:
        if len(piece) < size:
            break
        count += 1
    return count
