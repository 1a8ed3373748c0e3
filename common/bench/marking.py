"""Milliseconds that marking one generated program takes at this machine's level of isolation, beside those of a bare
interpreter that starts and ends."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from common.scoring import isolation, score

_PROBLEM = {"kind": "code", "entry_point": "double", "inputs": [[1], [2]], "expected": [2, 4]}
_ANSWER = "def double(number):\n    return 2 * number\n"


def measure_marking(num_programs: int) -> str:
    """The times, a line each."""
    _mark()  # tries the levels
    kinds = ((isolation(), _mark), ("bare interpreter", _start_bare))
    return "\n".join(f"{name}: {_milliseconds(action, num_programs)}" for name, action in kinds)


def _milliseconds(action: Callable[[], object], count: int) -> str:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - began))
    times.sort()
    return f"median {statistics.median(times):.0f} ms, 90% below {times[9 * count // 10]:.0f} ms, {count}"


def _mark() -> None:
    assert score(_PROBLEM, _ANSWER), "a right program was marked wrong"


def _start_bare() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
