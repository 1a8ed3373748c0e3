"""Answers are marked while others are decoded: a program takes tens of milliseconds, and seconds if it never ends."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from common.config import InputConfig
from common.scoring.benchmarks.benchmark import Row
from common.scoring.marking import is_program, marks

_MOST_THREADS = 8  # each waits for one process
_WAITING_PER_THREAD = 4  # records that wait are decoded again if the run is killed


class MarkingPool:
    """Marks records, and returns them in the order in which they are put in.

    Programs and rows of a benchmark are marked beside the decoding, other answers at once.
    """

    def __init__(self, source: InputConfig) -> None:
        self._source = source
        self._num_threads = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) - 1))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="marking")  # none is started yet
        self._waiting: deque[tuple[dict[str, Any], Future[dict[str, Any]]]] = deque()

    def put(self, record: dict[str, Any], row: Row, text: str) -> None:
        """Mark this answer."""
        if self._source.benchmark is not None or is_program(row, self._source):
            marked = self._threads.submit(marks, row, text, self._source)
        else:
            marked = Future()
            marked.set_result(marks(row, text, self._source))
        self._waiting.append((record, marked))

    def done(self) -> Iterator[dict[str, Any]]:
        """Yield records whose marks are known by now; more than a few never wait."""
        while self._waiting:
            if not self._waiting[0][1].done() and len(self._waiting) <= _WAITING_PER_THREAD * self._num_threads:
                return
            yield self._next()

    def rest(self, limit_s: float = math.inf) -> Iterator[dict[str, Any]]:
        """Yield all others, as soon as they are marked; after limit_s seconds those that then are."""
        ends_at = time.monotonic() + limit_s
        while self._waiting:
            left_s = min(threading.TIMEOUT_MAX, max(0.0, ends_at - time.monotonic()))
            if not wait([self._waiting[0][1]], left_s).done:
                return
            yield self._next()

    def close(self) -> None:
        """Stop marking."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> dict[str, Any]:
        record, marked = self._waiting.popleft()
        return {**record, **marked.result()}
