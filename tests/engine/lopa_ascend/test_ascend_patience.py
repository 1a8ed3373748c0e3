"""A step waits briefly for ranks that are warm, longer for one that captures; ranks that load wait for each other."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from common.errors import EngineError
from common.processes import meet, store
from lopa_ascend.passes import Patience


class DoneAfter:
    """An event that the device comes past so many seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def query(self) -> bool:
        return time.monotonic() > self._at


class Counts(Counter[str]):
    def __call__(self, name: str, add: int) -> int:
        self[name] += add
        return self[name]


def test_a_peer_that_is_gone_is_waited_for_briefly() -> None:
    with pytest.raises(EngineError, match=r"not answered for 0\.05 s: a peer is gone or stuck"):
        Patience(0.05, 60, Counts()).wait(DoneAfter(5))


def test_a_peer_that_captures_is_waited_for() -> None:
    patience, began = Patience(0.05, 60, Counts()), time.monotonic()
    with patience.capturing():
        patience.wait(DoneAfter(0.4))
    assert 0.3 < time.monotonic() - began < 30


def test_a_peer_that_captures_for_too_long_is_not() -> None:
    patience = Patience(0.05, 0.2, Counts())
    with patience.capturing(), pytest.raises(EngineError, match="not answered"):
        patience.wait(DoneAfter(5))


def test_a_step_behind_a_capture_has_its_own_time_once() -> None:
    patience = Patience(0.2, 60, Counts())
    with patience.capturing():
        pass
    patience.wait(DoneAfter(0.3))
    with pytest.raises(EngineError, match="not answered"):
        patience.wait(DoneAfter(5))


def test_usual_steps_ask_nobody() -> None:
    Patience(5, 60, lambda name, add: pytest.fail("asked")).wait(DoneAfter(0.01))
    Patience(5, 60, lambda name, add: pytest.fail("asked")).wait(None)


class Store:
    """Of the launcher: what others add comes a little later."""

    def __init__(self, num_come: int) -> None:
        self._num_come = num_come

    def add(self, key: str, amount: int) -> int:
        self._num_come += 1
        return self._num_come


def test_processes_that_load_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "4")
    monkeypatch.setattr(store, "_store", lambda: Store(1))
    monkeypatch.setattr(store, "_POLL_S", 0.01)
    meet(5)
    monkeypatch.setattr(store, "_store", lambda: Store(-100))
    with pytest.raises(EngineError, match=r"of 4 processes have not loaded within 0\.05 s: a peer .* start_timeout_s"):
        meet(0.05)
