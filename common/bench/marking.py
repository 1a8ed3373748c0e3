"""Milliseconds that marking one generated program takes at this machine's level of isolation, beside those of a bare
interpreter that starts and ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from common.bench.host import spread
from common.scoring import isolation, score

_PROBLEM = {"kind": "code", "entry_point": "double", "inputs": [[1], [2]], "expected": [2, 4]}
_ANSWER = "def double(number):\n    return 2 * number\n"


def measure_marking(num_programs: int) -> str:
    """Return the times, a line each."""
    _mark()  # tries the levels
    kinds = ((isolation(), _mark), ("bare interpreter", _start_bare))
    return "\n".join(f"{name}: {_milliseconds(action, num_programs)}" for name, action in kinds)


def _milliseconds(action: Callable[[], object], count: int) -> str:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return f"{spread(times, 'ms')}, {count}"


def _mark() -> None:
    assert score(_PROBLEM, _ANSWER), "a right program was marked wrong"


def _start_bare() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
