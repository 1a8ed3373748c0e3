"""Requests of a pass solved side by side: the loops of a solution hold no lock of the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.decoding.scheduling.held.answer import Workspaces

_MOST_THREADS = 4
_LEAST_EACH = 4  # requests, for which waking a thread pays

Item = TypeVar("Item")


class Threads:
    """Runs work over requests, on more than one thread where there are many of them. A request's result does not depend
    on which."""

    def __init__(self) -> None:
        self._spaces = [Workspaces() for _ in range(min(_MOST_THREADS, os.cpu_count() or 1))]
        self._pool: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[Item, Workspaces], None], items: Sequence[Item]) -> None:
        if not items:
            return
        count = max(1, min(len(self._spaces), len(items) // _LEAST_EACH))
        if self._pool is None and count > 1:
            self._pool = ThreadPoolExecutor(len(self._spaces) - 1, "formats")
        others = [
            self._pool.submit(_run, work, items[first::count], self._spaces[first])
            for first in range(1, count)
            if self._pool is not None
        ]
        _run(work, items[::count], self._spaces[0])
        for other in others:
            other.result()


def _run(work: Callable[[Item, Workspaces], None], items: Sequence[Item], spaces: Workspaces) -> None:
    for item in items:
        work(item, spaces)
