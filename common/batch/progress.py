"""How far a run is, as rank 0 shows it: a bar on a terminal, a line now and then elsewhere.

It reads the shared output file, so it counts what every replica has finished.
"""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.batch.output import Record, Tail

logger = logging.getLogger(__name__)
LINE_EVERY_S = 10.0


class Progress:
    """The progress of a run. `records` are those of this start, whoever wrote them; `done` and `total` count earlier
    ones as well."""

    def __init__(self, path: Path, num_pending: int) -> None:
        self._path = path
        self._tail = Tail(path)
        self._num_before = len(self._tail.read_new())
        self.total = self._num_before + num_pending
        self._started_at = time.monotonic()
        self._num_finished = self._tokens = 0
        self._tpf = self._tps = 0.0  # sums over requests
        self.records: list[Record] = []
        self._view = _view(self._num_before, self.total) if num_pending else None
        self._show()

    @property
    def done(self) -> int:
        return self._num_before + len(self.records)

    def update(self) -> None:
        added = self._tail.read_new()
        if not added or self._view is None:
            return
        self.records += added
        for record in added:
            if "error" not in record:
                self._num_finished += 1
                self._tokens += record["effective_tokens"]
                self._tpf += record["tpf_effective"]
                self._tps += record["tps_effective"] or 0.0
        self._show()

    def recount(self) -> None:
        """Count again after an `update` that may have been interrupted between reading records and counting them."""
        self._num_before = len(Tail(self._path).read_new()) - len(self.records)

    def close(self) -> None:
        if self._view is not None:
            self._show(is_last=True)

    def _show(self, *, is_last: bool = False) -> None:
        if isinstance(self._view, _Lines):
            self._view.show(f"{self._path}: {self.done} of {self.total} requests{self._speed()}{self._left()}", is_last)
        elif self._view is not None:
            self._view.set_postfix_str(self._speed().removeprefix(", "), refresh=False)
            self._view.update(self.done - self._view.n)
            if is_last:
                self._view.close()

    def _speed(self) -> str:
        """The summary's numbers, of what this start has decoded so far."""
        count, seconds = self._num_finished, time.monotonic() - self._started_at
        if not self._tokens or not seconds:
            return ""
        a_request, together = self._tps / count, self._tokens / seconds
        return f", TPF {self._tpf / count:.2f}, {a_request:.1f} tokens/s a request, {together:.1f} together"

    def _left(self) -> str:
        left = self.total - self.done
        if not self.records or not left:
            return ""
        seconds = (time.monotonic() - self._started_at) / len(self.records) * left
        return f", ETA {timedelta(seconds=round(seconds))}"


class _Lines:
    """A view for a log: a line at the start, one every `LINE_EVERY_S` at most, and one at the end."""

    def __init__(self) -> None:
        self._shown = ""
        self._next_at = time.monotonic()

    def show(self, line: str, is_last: bool) -> None:
        if line != self._shown and (is_last or time.monotonic() >= self._next_at):
            logger.info("%s", line)
            self._shown = line
            self._next_at = time.monotonic() + LINE_EVERY_S


def _view(num_done: int, total: int) -> tqdm[Any] | _Lines:
    if not sys.stderr.isatty():
        return _Lines()
    return tqdm(total=total, initial=num_done, unit="req", dynamic_ncols=True)
