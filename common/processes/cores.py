"""One slice of the node's cores a process, and in it one core for the thread that polls the device.

Threads and processes inherit the cores of the thread that starts them. So a process leaves its first core before
libraries start their threads, and its main thread goes there when all are there. It may go elsewhere, and so may what
it starts later: bound to the one core, a library's late thread would share it with the thread that never sleeps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from common.processes.ranks import local_rank, num_started_here

logger = logging.getLogger(__name__)


def slice_of(cores: Sequence[int], rank: int, count: int) -> list[int]:
    """The rank's part of `count` equal parts, of ascending cores: neighbours share caches and memory."""
    each = len(cores) // count
    return sorted(cores)[rank * each : (rank + 1) * each]


def cores_of(place: int, count: int) -> list[int]:
    """Return the part of this process's cores that one of `count` processes gets; none where a part would be empty or
    the system cannot bind."""
    return slice_of(sorted(os.sched_getaffinity(0)), place, count) if hasattr(os, "sched_getaffinity") else []


def leave_first_core() -> int | None:
    """Bind this process to its slice but for the first core, which is returned; None, and nothing bound, where a slice
    has no two cores or the system cannot bind."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    mine = slice_of(sorted(os.sched_getaffinity(0)), local_rank(), num_started_here() or 1)
    if len(mine) < 2:
        logger.info("cores: slice has no two cores a process here: nothing is bound")
        return None
    os.sched_setaffinity(0, mine[1:])
    logger.info("cores %d to %d: the first polls the device", mine[0], mine[-1])
    return mine[0]


def poll_on(core: int | None) -> None:
    """Move the calling thread to that core, and let it and what it starts use those that it had as well."""
    if core is not None:
        others = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(0, {core, *others})
