"""What a training run says: lines with the seconds since it began."""

from __future__ import annotations

import time
from collections.abc import Callable

Log = Callable[[str], None]


def start_log() -> Log:
    """Return what prints a line after the seconds since this call."""
    began = time.perf_counter()

    def log(text: str) -> None:
        print(f"[{time.perf_counter() - began:7.1f} s] {text}", flush=True)

    return log
