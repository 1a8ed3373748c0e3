"""Waiting for the device with a deadline, and a device's errors as users read them."""

from __future__ import annotations

import time
from typing import Protocol

from common.errors import LOST_PEER, EngineError, is_out_of_memory
from graphs.cann import told

_SIGNS_OF_A_LOST_PEER = ("Timed out", "Connection closed", "Connection reset", "NCCL error", "Broken pipe")


class DeviceEvent(Protocol):
    def query(self) -> bool:
        """Whether the device has come past it."""


def wait_until_done(event: DeviceEvent | None, timeout_s: float) -> None:
    """Return once the device has come past the event (None: at once). Raises EngineError after the timeout.

    Polls: a collective whose peer is gone would never end a wait, and sleeping in between costs every step.
    """
    if event is None:
        return
    deadline = time.monotonic() + timeout_s
    while not event.query():
        # Asked again, since this process may have stood still between the question and the clock.
        if time.monotonic() > deadline and not event.query():
            raise EngineError(
                f"the device has not answered for {timeout_s:g} s: {LOST_PEER}, or the step is "
                "longer than collective_timeout_s"
            )


def explained(error: RuntimeError, rank: int, step: int) -> EngineError:
    """Turn a device's error into one that names rank and step. For `except` clauses, which cost a step nothing."""
    where = f"rank {rank}, step {step}"
    if is_out_of_memory(error):
        return EngineError(f"{where}: out of device memory; lower max_num_requests, num_lookahead or max_model_len")
    reason = told(error)
    if any(sign in reason for sign in _SIGNS_OF_A_LOST_PEER):
        reason = f"{LOST_PEER} ({reason})"
    return EngineError(f"{where}: {reason}")
