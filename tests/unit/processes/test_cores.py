"""Every process of a node gets its own equal slice of cores, and its main thread goes to the first of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from started import python

from common.processes.cores import slice_of

ROOT = Path(__file__).resolve().parents[3]


def test_slices_are_equal_and_apart() -> None:
    cores = [*range(3, 20)]
    slices = [slice_of(cores, rank, 4) for rank in range(4)]
    assert [len(each) for each in slices] == [4] * 4
    assert [core for each in slices for core in each] == cores[:16]
    assert slice_of([0, 1, 2], 0, 4) == []


# Prints the first core, and what the main thread is bound to one after another.
_PROCESS = """
import os
bound = [range(8)]
os.sched_getaffinity = lambda pid: set(bound[-1])
os.sched_setaffinity = lambda pid, chosen: bound.append(sorted(chosen))
from common.processes import leave_first_core, poll_on
core = leave_first_core()
poll_on(core)
print(core, bound[1:])
"""


@pytest.mark.parametrize(
    ("rank", "count", "printed"),
    [
        (1, 2, "4 [[5, 6, 7], [4], [4, 5, 6, 7]]"),
        (0, 1, "0 [[1, 2, 3, 4, 5, 6, 7], [0], [0, 1, 2, 3, 4, 5, 6, 7]]"),
        (0, 8, "None []"),
    ],
)
def test_a_process_leaves_its_first_core_to_its_main_thread(rank: int, count: int, printed: str) -> None:
    done = python("-c", _PROCESS, env={"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}, check=True)
    assert done.stdout.strip() == printed


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="this machine has one core")
def test_threads_keep_off_the_first_core_or_are_not_bound_to_it_alone() -> None:
    """One that was there before, one that comes later, and a later process."""
    program = """
import os, subprocess, sys, threading
from common.processes import leave_first_core, poll_on
core, ready, seen = leave_first_core(), threading.Event(), []
thread = threading.Thread(target=lambda: (ready.wait(), seen.append(os.sched_getaffinity(0))))
thread.start()
poll_on(core)
ready.set()
thread.join()
later = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
later.start()
later.join()
assert core not in seen[0] and seen[0] and seen[1] == {core, *seen[0]}, seen
print_cores = "import os; print(sorted(os.sched_getaffinity(0)))"
child = subprocess.run([sys.executable, "-c", print_cores], capture_output=True, text=True)
assert child.stdout.strip() == str(sorted(seen[1])), child
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("LOCAL_WORLD_SIZE", None)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
