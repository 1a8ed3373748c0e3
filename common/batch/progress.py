"""The bar that rank 0 shows: it reads the shared output file, so it counts what every replica has finished."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.batch.output import Record, Tail

_LOG_EVERY_S = 10.0  # where stderr is a log file


class Progress:
    """`records` are those of this start, whoever wrote them; `done` counts earlier ones as well."""

    def __init__(self, path: Path, num_pending: int) -> None:
        self._tail = Tail(path)
        self._num_before = len(self._tail.read_new())
        self.records: list[Record] = []
        self._bar: tqdm[Any] | None = None
        if num_pending:
            self._bar = tqdm(
                total=self._num_before + num_pending,
                initial=self._num_before,
                unit="req",
                dynamic_ncols=True,
                mininterval=0.1 if sys.stderr.isatty() else _LOG_EVERY_S,
            )
        self._tokens = self._steps = 0
        self._seconds = 0.0

    @property
    def done(self) -> int:
        return self._num_before + len(self.records)

    def update(self) -> None:
        added = self._tail.read_new()
        if not added or self._bar is None:
            return
        self.records += added
        for record in added:
            if "error" not in record:
                self._tokens += record["effective_tokens"]
                self._steps += record["steps"]
                self._seconds += record["seconds"]
        if self._steps and self._seconds:
            speed = f"TPF {self._tokens / self._steps:.2f}, TPS {self._tokens / self._seconds:.1f}"
            self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update(len(added))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
