"""Decode requests that are made up, before the first real one: to have the loops compiled while weights are read, once
on a node, and to time them.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from threading import Thread

import numpy as np

from common.compiled import IS_COMPILED, SLOW, all_kept, machine_code_folder
from common.config import DecodeConfig
from common.constraints import NEVER, Automaton
from common.decoding.plan import ClassField, ClassStatistics, Predictions
from common.decoding.request import GenerationRequest
from common.decoding.scheduling.rules import ModelFacts
from common.decoding.scheduling.scheduler import Scheduler
from common.decoding.scheduling.state import StepRecord

logger = logging.getLogger(__name__)

_STEPS = 32  # of requests that are made up
_MOST_TIMED = 64  # requests at once
_SHORT = DecodeConfig(num_lookahead=1, block_size=2, max_new_tokens=4)
_ANY_TEXT = Automaton(np.ones(8, np.int32), np.array([[NEVER, 0]], np.int32), np.ones(1, np.bool_), 0, "any text")


def start_warming() -> Thread:
    """Start `warm_up` in a thread, which the caller joins before the first request."""
    thread = Thread(target=warm_up, name="compile the scheduler's loops", daemon=True)
    thread.start()
    return thread


def warm_up() -> None:
    """Decode requests of four tokens in all ways that compile something: by all strategies at once, by exact scores,
    held to a format, observed. Some minutes the first time, then two seconds to read machine code."""
    if not IS_COMPILED:
        logger.warning(SLOW)
        return
    with _one_process_at_a_time():
        scheduler, _ = _decoded(_SHORT, 1)
        scheduler.can_begin(GenerationRequest("", (1,)))
        _decoded(_SHORT.changed({"branch_score": "exact"}), 1)
        for temperature in (0.0, 1.0):
            _decoded(_SHORT.changed({"temperature": temperature}), 1, _ANY_TEXT)
        _decoded(_SHORT, 1, observer=lambda _: None)


def host_seconds(decode: DecodeConfig, num_requests: int) -> tuple[float, float]:
    """Return seconds of a step's scheduling for one request of these settings, and for each further one of so many."""
    of_one, num_more = median(_decoded(decode, 1)[1]), min(num_requests, _MOST_TIMED) - 1
    if not num_more:
        return of_one, 0.0
    return of_one, max(median(_decoded(decode, 1 + num_more)[1]) - of_one, 0.0) / num_more


def _decoded(
    decode: DecodeConfig,
    num_requests: int,
    automaton: Automaton | None = None,
    observer: Callable[[StepRecord], None] | None = None,
) -> tuple[Scheduler, list[float]]:
    """Decode so many requests for some steps, or to their end: with predictions below the usual thresholds, so that
    every lookahead is tried. Returns the seconds of each step too. automaton: that of their format."""
    endless = decode.changed({"stop": (), "stop_token_ids": (), "eos_token_id": -1})
    facts = ModelFacts(shift=int(not decode.strategy.num_best), edit_ids=(2, 3))
    scheduler = Scheduler(
        endless, mask_token_id=0, eos_token_id=None, num_slots=num_requests, facts=facts, observer=observer
    )
    for index in range(num_requests):
        scheduler.admit(GenerationRequest(str(index), (1,) * decode.block_size, automaton=automaton))
    seconds: list[float] = []
    while scheduler.active and len(seconds) < _STEPS:
        began = time.perf_counter()
        plan = scheduler.plan_step()
        planned = time.perf_counter()
        values_XT = np.ones((plan.sampling.num_values, plan.num_tokens), np.float32)
        values_XT[1] = 0.5
        entry_X, classes = plan.is_read_T.nonzero()[0], {}
        for own in (plan.automaton_of or {}).values():
            values_XC5 = np.ones((len(entry_X), own.num_classes, len(ClassField)), np.float32)
            classes[own.key] = ClassStatistics(entry_X, values_XC5)
        predictions = Predictions(values_XT, classes)
        answered = time.perf_counter()
        scheduler.advance(scheduler.select_winners(predictions))
        seconds.append(planned - began + time.perf_counter() - answered)
        scheduler.newly_final()
    return scheduler, seconds


@contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Let the first process of a machine compile, and the others read what it has made, side by side."""
    folder = machine_code_folder()
    has_all = all_kept(Path(folder))
    with ExitStack() as stack:
        with suppress(OSError):
            if folder and not has_all.exists():  # else each compiles for itself
                lock = stack.enter_context(Path(folder, "lock").open("w"))
                logger.info("first start of this version: compiling the scheduler's loops takes some minutes")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        with suppress(OSError):
            if folder:
                has_all.touch()
