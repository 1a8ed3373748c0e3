"""A step waits briefly for ranks that are warm, longer for one that captures; ranks that load wait for each other."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from common.errors import EngineError
from common.processes import meet, store
from common.runtime import waiting
from lopa_ascend.steps import Patience
from tests.clock import Clock


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (waiting, store):
        monkeypatch.setattr(module, "time", clock)
    return clock


class DoneAfter:
    """An event that the device comes past so many seconds from now. stands_still: this process, once, after a look."""

    def __init__(self, clock: Clock, seconds: float, stands_still: float = 0.0) -> None:
        self._clock = clock
        self._at = clock.now + seconds
        self._stands_still = stands_still

    def query(self) -> bool:
        is_done = self._clock.now > self._at
        self._clock.now += 0.001 + self._stands_still
        self._stands_still = 0.0
        return is_done


class Counts(Counter[str]):
    def __call__(self, name: str, add: int) -> int:
        self[name] += add
        return self[name]


def test_a_peer_that_is_gone_is_waited_for_briefly(clock: Clock) -> None:
    began = clock.now
    with pytest.raises(EngineError, match=r"not answered for 0\.5 s: a peer is gone or stuck"):
        Patience(0.5, 60, Counts()).wait(DoneAfter(clock, 5))
    assert clock.now - began < 0.6


def test_a_peer_that_captures_is_waited_for(clock: Clock) -> None:
    patience, began = Patience(0.5, 60, Counts()), clock.now
    with patience.capturing():
        patience.wait(DoneAfter(clock, 40))
    assert 40 < clock.now - began < 41


def test_a_peer_that_captures_for_too_long_is_not(clock: Clock) -> None:
    patience, began = Patience(0.5, 60, Counts()), clock.now
    with patience.capturing(), pytest.raises(EngineError, match="not answered"):
        patience.wait(DoneAfter(clock, 100))
    assert 59 < clock.now - began < 61


def test_a_step_behind_a_capture_has_its_own_time_once(clock: Clock) -> None:
    patience = Patience(2, 60, Counts())
    with patience.capturing():
        pass
    patience.wait(DoneAfter(clock, 3))
    with pytest.raises(EngineError, match="not answered"):
        patience.wait(DoneAfter(clock, 3))


def test_usual_steps_ask_nobody(clock: Clock) -> None:
    Patience(5, 60, lambda name, add: pytest.fail("asked")).wait(DoneAfter(clock, 4))
    Patience(5, 60, lambda name, add: pytest.fail("asked")).wait(None)


def test_a_process_that_stood_still_does_not_take_its_peers_for_lost(clock: Clock) -> None:
    waiting.wait_until_done(DoneAfter(clock, 1, stands_still=600), 30)


class Store:
    """The launcher's store: what others add comes a little later."""

    def __init__(self, num_come: int) -> None:
        self._num_come = num_come

    def add(self, key: str, amount: int) -> int:
        self._num_come += 1
        return self._num_come


def test_processes_that_load_wait_for_all(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.setattr(store, "_store", lambda: Store(1))
    meet(5)
    monkeypatch.setattr(store, "_store", lambda: Store(-100))
    began = clock.now
    with pytest.raises(EngineError, match=r"of 4 processes have not loaded within 5 s: a peer .* npu\.start_timeout_s"):
        meet(5)
    assert clock.now - began < 6
