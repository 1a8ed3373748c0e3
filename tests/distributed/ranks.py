"""The ranks of a test as forks of one process: torch is imported once, which is what starting them costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch import multiprocessing

from tests.ports import free_port


def fork_ranks(run: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Call `run(*arguments)` in `num_ranks` processes with the environment that torchrun would give them."""
    size = str(num_ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    multiprocessing.start_processes(_rank, args=(run, *arguments), nprocs=num_ranks, start_method="fork")


def _rank(local_rank: int, run: Callable[..., None], *arguments: Any) -> None:
    os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank))
    run(*arguments)
    sys.stdout.flush()
    os._exit(0)  # simulated communicators have nobody to say goodbye to
