"""Milliseconds that scoring one generated program takes at this machine's level of isolation, beside those of a bare
interpreter that starts and ends.

python scripts/bench_isolation.py [--programs 50]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from common.scoring import isolation, score

PROBLEM = {"kind": "code", "entry_point": "double", "inputs": [[1], [2]], "expected": [2, 4]}
ANSWER = "def double(number):\n    return 2 * number\n"


def milliseconds(action: Callable[[], object], count: int) -> list[float]:
    """Sorted."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)


def answer() -> None:
    assert score(PROBLEM, ANSWER), "a right program was marked wrong"


def bare() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=50)
    count = parser.parse_args().programs
    answer()  # tries the levels
    for name, action in ((isolation(), answer), ("bare interpreter", bare)):
        times = milliseconds(action, count)
        print(f"{name}: median {statistics.median(times):.0f} ms, 90% below {times[9 * count // 10]:.0f} ms, {count}")


if __name__ == "__main__":
    main()
