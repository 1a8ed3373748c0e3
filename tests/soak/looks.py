"""What is looked at when the server is idle after a fault, and every few seconds: is anything left, is it as fast?"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from tests.engine.serving.served import QUESTION
from tests.soak.asks import COMPLETIONS, Ask, send
from tests.soak.server import NOTHING, SoakedServer, shared_memory

_PROBE = Ask("probe", COMPLETIONS, {"prompt": QUESTION.format(17) + "\n", "max_tokens": 192, "ignore_eos": True})
_KV = "vllm:kv_cache_usage_perc"
_SAMPLE_S = 15.0
# What an idle server may hold beside what it held at first: a connection that is being closed, a thread of a pool.
_SPARE_HANDLES, _SPARE_THREADS = 6, 4
_SPARE_MIB, _SLOWER = 64.0, 2.0
_SPARE_KV = 0.15  # of the cache: how much one request is seen to hold differs by when one looks


class Looks:
    """Rounds: a dict each with what an idle server holds after a fault. Samples: columns over time, faults and all."""

    def __init__(self, server: SoakedServer, began: float) -> None:
        self.server, self.began = server, began
        self.rounds: list[dict[str, Any]] = []
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.broken: list[str] = []
        self._shared = shared_memory()

    def hours(self) -> float:
        return round((time.monotonic() - self.began) / 3600, 4)

    def sample_until(self, is_over: Callable[[], bool]) -> threading.Thread:
        def run() -> None:
            while not is_over():
                self._sample()
                time.sleep(_SAMPLE_S)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _sample(self) -> None:
        parts = self.server.held()
        replicas = sum((held for name, held in parts.items() if name.startswith("replica")), NOTHING)
        row = {
            "hours": self.hours(),
            "front end MiB": parts["front end"].rss, "launcher MiB": parts["launcher"].rss,
            "replicas MiB": replicas.rss,
            "handles": sum(held.handles for held in parts.values()),
            "threads": sum(held.threads for held in parts.values()),
        }  # fmt: skip
        for name, value in row.items():
            self.samples[name].append(round(value, 4))

    def look(self, fault: str, answered: list[float], probes: int = 3) -> None:
        """Wait after a fault until nothing is left to do, then compare with the first look, before any fault."""
        self.server.wait_idle()
        found = [self._probe() for _ in range(probes)]
        self.server.wait_idle()
        parts = self.server.held()
        own = sum(parts.values(), NOTHING)
        now = {
            "hours": self.hours(), "fault": fault, "probe s": round(median(seconds for seconds, _ in found), 4),
            "probe kv": max(kv for _, kv in found), "answered": len(answered),
            "median s": round(median(answered), 4) if answered else None,
            "handles": own.handles, "threads": own.threads, "temporary files": self.server.temporary_files(),
            "shared memory": len(shared_memory() - self._shared),
            "MiB": {name: round(held.rss, 1) for name, held in parts.items()},
        }  # fmt: skip
        self.rounds.append(now)
        self._compare(self.rounds[0], now)

    def _compare(self, first: dict[str, Any], now: dict[str, Any]) -> None:
        bounds = {
            "handles": first["handles"] + _SPARE_HANDLES, "threads": first["threads"] + _SPARE_THREADS,
            "temporary files": first["temporary files"] + self.server.num_replicas, "shared memory": 0,
            "probe kv": first["probe kv"] + _SPARE_KV,
        }  # fmt: skip
        for name, most in bounds.items():
            if now[name] > most:
                self.broken.append(f"{now['fault']}: {name} of an idle server: {now[name]}, at first {first[name]}")

        for part in ("front end", "launcher"):
            if now["MiB"][part] > first["MiB"][part] + _SPARE_MIB:
                self.broken.append(
                    f"{now['fault']}: MiB of the {part}: {now['MiB'][part]}, at first {first['MiB'][part]}"
                )

    def compare_latency(self) -> None:
        """Check at the end that requests alone take as long after a fault as after none, on a machine that varies."""
        none, others = (
            [one["probe s"] for one in self.rounds if (one["fault"] == "none") == is_none] for is_none in (True, False)
        )
        if none and others and median(others) > _SLOWER * median(none):
            self.broken.append(f"a request alone takes {median(others):.2f} s after a fault, {median(none):.2f} s else")

    def _probe(self) -> tuple[float, float]:
        """Seconds of one request alone, and the most of the cache that was in use meanwhile."""
        end: list[float] = []

        def ask() -> None:
            judged = send(self.server.port, _PROBE)
            end.append(judged.seconds)
            if judged.what != "answered":
                self.broken.append(f"a request alone: {judged.what}: {judged.said}")

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        most = 0.0
        while thread.is_alive():
            most = max(most, self.server.gauges()[_KV])
            thread.join(0.1)
        return end[0], most
