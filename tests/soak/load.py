"""Clients that ask at a steady mean rate, and the counts of what became of their requests, by the fault of the time."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping

from tests.engine.serving.served import Served
from tests.soak.asks import Ask, End, leave, send, send_wrong

_NUM_CLIENTS = 6
_LEFT, _WRONG = 0.12, 0.2  # shares of requests


class Load:
    """expected: the texts of each ask. rate: requests a second, all clients together."""

    def __init__(self, server: Served, expected: Mapping[int, tuple[str, ...]], asks: list[Ask], rate: float) -> None:
        self.server, self.asks, self.expected, self.rate = server, asks, expected, rate
        self.counts: dict[str, Counter[str]] = {}
        self.seconds: dict[str, list[float]] = {}  # of what was answered
        self.broken: list[str] = []
        self._kind = ""
        self._is_going, self._lock = threading.Event(), threading.Lock()
        self._num_open = 0
        for seed in range(_NUM_CLIENTS):
            threading.Thread(target=self._client, args=(random.Random(seed),), daemon=True).start()

    def begin(self, kind: str) -> None:
        """Count under this name, and ask."""
        self._kind = kind
        self.counts.setdefault(kind, Counter())
        self.seconds.setdefault(kind, [])
        self._is_going.set()

    def pause(self, wait_s: float) -> None:
        """Ask nothing more, and wait for the ends of what is open; what has none by then is lost."""
        self._is_going.clear()
        deadline = time.monotonic() + wait_s
        while self._num_open and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._num_open:
            self._note("lost", f"{self._num_open} requests without an end after {wait_s:.0f} s", self._num_open)

    def add(self, end: End, kind: str) -> None:
        """Count a request that somebody else has sent."""
        self.counts[kind]["in"] += 1
        self._record(end, kind)

    def _note(self, what: str, sentence: str, number: int = 1) -> None:
        self.counts[self._kind][what] += number
        self.broken.append(f"{self._kind}: {what}: {sentence}")

    def _client(self, rng: random.Random) -> None:
        while True:
            self._is_going.wait()
            time.sleep(rng.expovariate(self.rate / _NUM_CLIENTS))
            with self._lock:
                if not self._is_going.is_set():
                    continue
                kind = self._kind
                self._num_open += 1
                self.counts[kind]["in"] += 1
            try:
                self._record(self._one(rng), kind)
            except Exception as error:  # a client that ends would go unnoticed
                self._record(End("wrong", 0.0, f"what came could not be read: {error!r}"), kind)
            finally:
                with self._lock:
                    self._num_open -= 1

    def _one(self, rng: random.Random) -> End:
        draw = rng.random()
        if draw < _LEFT:
            return leave(self.server, rng)
        if draw < _LEFT + _WRONG:
            return send_wrong(self.server.port, rng)
        place = rng.randrange(len(self.asks))
        return send(self.server.port, self.asks[place], self.expected[place])

    def _record(self, end: End, kind: str) -> None:
        with self._lock:
            self.counts[kind][end.what] += 1
            if end.what == "answered":
                self.seconds[kind].append(end.seconds)
            if end.what in ("lost", "doubled", "wrong"):
                self.broken.append(f"{kind}: {end.what}: {end.said[:500]}")
