"""Have the loops compiled before the first request: while weights are read, and once on a node."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread

import numpy as np

from common.compiled import IS_COMPILED, SLOW, machine_code_folder
from common.config import DecodeConfig
from common.decoding.plan import Predictions
from common.decoding.request import GenerationRequest
from common.decoding.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


def start_warming() -> Thread:
    """Begin in a thread, which the caller joins once it has done what it has to do meanwhile."""
    thread = Thread(target=warm_up, name="compile the scheduler's loops", daemon=True)
    thread.start()
    return thread


def warm_up() -> None:
    """Decode a request of four tokens. About a minute the first time, then two seconds to read machine code."""
    if not IS_COMPILED:
        logger.warning(SLOW)
        return
    with _one_process_at_a_time():
        decode = DecodeConfig(num_lookahead=1, block_size=2, max_new_tokens=4, eos_token_id=-1)
        scheduler = Scheduler(decode, mask_token_id=0, eos_token_id=None)
        scheduler.admit(GenerationRequest("", (1, 2)))
        while scheduler.active:
            plan = scheduler.plan_step()
            ones_T = np.ones(plan.num_tokens, np.float32)
            scheduler.advance(scheduler.select_winners(Predictions(np.stack((ones_T, ones_T / 2, ones_T)))))
            scheduler.newly_final()
        scheduler.can_begin(GenerationRequest("", (1,)))


@contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Let the first process of a machine compile, and the others read what it has made, side by side."""
    folder = machine_code_folder()
    has_all = Path(folder, "has_all")
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that cannot be written: each compiles for itself
            if folder and not has_all.exists():
                lock = stack.enter_context(Path(folder, "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        with suppress(OSError):
            if folder:
                has_all.touch()
