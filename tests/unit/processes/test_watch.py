"""What a launcher says of another node that falls silent, or that holds a store which does."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from common.processes import Nodes, watch


class Store:
    """A rendezvous store in this process. is_deaf: calls wait for ever, as on a network that is cut."""

    def __init__(self, is_deaf: bool = False) -> None:
        self.values: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.is_deaf = is_deaf

    def add(self, key: str, number: int) -> int:
        if self.is_deaf:
            threading.Event().wait(60)
        self.counts[key] += number
        return self.counts[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_BEAT_S", 0.005)
    monkeypatch.setattr(watch, "_SILENCE_S", 0.2)


def stopped(store: Store, node: int, num_here: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why the launcher of this node of two ends itself."""
    is_killed = threading.Event()
    monkeypatch.setattr(watch.os, "kill", lambda *_: is_killed.set())

    class Watched(watch.NodeWatch):
        def _connect(self, timeout_s: float) -> Any:
            return store

    made = Watched(Nodes(2, node, "127.0.0.1", 29500), num_here)
    made.start()
    assert is_killed.wait(60)
    made.end()
    return made.reason


def test_a_node_that_falls_silent_is_named_by_address_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.add("lopa/beat/1", 1)
    store.set("lopa/node/1", "10.0.0.7")
    reason = stopped(store, 0, 4, monkeypatch)
    assert reason is not None and reason.startswith("node 1 (10.0.0.7, ranks 4 to 7) has not been heard of for")
    assert store.get("lopa/node/0") == b"127.0.0.1", "as the others know it"


def test_a_store_that_does_not_answer_is_the_first_nodes_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = stopped(Store(is_deaf=True), 1, 1, monkeypatch)
    assert reason is not None and reason.startswith("node 0 (127.0.0.1, rank 0) has not been heard of for")


def test_what_another_node_tells_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.set("lopa/failed/1", "node 1: rank 1 failed")
    store.set("lopa/failed", "")
    assert stopped(store, 0, 1, monkeypatch) == "node 1: rank 1 failed"
