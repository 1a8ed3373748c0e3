"""How long the host waits for a step: briefly once all ranks are warm, and longer while one of them captures.

A rank that captures a shape says so in the launcher's store before and after it; the others look only when their short
deadline has passed, so that usual steps cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import EngineError
from common.processes import shared_count
from common.runtime import DeviceEvent, wait_until_done


class Patience:
    """step_s: seconds to wait for warm ranks. start_s: seconds to wait for one that captures. count:
    common.processes.shared_count."""

    def __init__(self, step_s: float, start_s: float, count: Callable[[str, int], int] = shared_count) -> None:
        self._step_s, self._start_s = step_s, start_s
        self._count = count
        self._num_ended = 0  # captures that have been waited for

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._count("captures begun", 1)
        try:
            yield
        finally:
            self._count("captures ended", 1)

    def wait(self, event: DeviceEvent | None) -> None:
        """Wait until the device has come past the event. Raises EngineError."""
        try:
            wait_until_done(event, self._step_s)
        except EngineError:
            more_s = self._more_s()
            if more_s == 0:
                raise
            wait_until_done(event, more_s)

    def _more_s(self) -> float:
        """Seconds to wait after the short deadline: the rest of the long one while a rank captures, a step's if one has
        just captured."""
        num_begun, num_ended = self._count("captures begun", 0), self._count("captures ended", 0)
        has_just_ended, self._num_ended = num_ended > self._num_ended, num_ended
        if num_begun > num_ended:
            return max(self._start_s - self._step_s, self._step_s)
        return self._step_s if has_just_ended else 0.0
