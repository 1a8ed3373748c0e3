"""Runs the same work again and again at fixed shapes: captured once a shape and replayed, or called as it is.

A shape's *buffers* are what the work reads and writes; the caller fills them before a run. The runner knows no vendor:
`capture` turns a function into its replay (graphs.cuda, graphs.npu), and without one every run calls the function.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT", bound=Hashable)
BuffersT = TypeVar("BuffersT")
Replay = Callable[[], None]
Agree = Callable[[bool], bool]


class Capture(Protocol):
    """A platform's graph capture."""

    def __call__(self, work: Replay) -> Replay:
        """Record what `work` launches; the result launches it again, on the same memory. `work` has run before.

        Raises CaptureRefused.
        """

    def allocated_bytes(self) -> int:
        """Device memory held at the moment, for the report."""


class CaptureRefused(RuntimeError):
    """The device has no room for another graph, though the work itself runs."""


@dataclass(slots=True)
class Entry(Generic[BuffersT]):
    """One shape: its buffers, and how to run the work on them."""

    buffers: BuffersT
    run: Replay


class GraphRunner(Generic[KeyT, BuffersT]):
    """Keeps one entry for each key with capture; makes a fresh one each time without.

    allocate: buffers of a key, filled with something that `forward` can run on. forward: the work; it must not allocate
    what it leaves for others, read back to the host, or depend on anything but its buffers. most: keys that are
    captured; None: any number. agree: whether all have captured what this process has, asked after each capture of
    processes whose graphs hold collectives with each other: they may only replay the same capture.
    """

    def __init__(
        self,
        name: str,
        allocate: Callable[[KeyT], BuffersT],
        forward: Callable[[KeyT, BuffersT], None],
        capture: Capture | None = None,
        most: int | None = None,
        agree: Agree = bool,
    ) -> None:
        self.name = name
        self.num_captured = 0
        self.capture_seconds = 0.0
        self.capture_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._allocate = allocate
        self._forward = forward
        self._capture = capture
        self._most = most
        self._agree = agree
        self._is_refused = False
        self._entries: dict[KeyT, Entry[BuffersT]] = {}

    def has(self, key: KeyT) -> bool:
        return key in self._entries

    def has_room(self, key: KeyT) -> bool:
        """Whether the key has its buffers and graph, or would get them; the same in processes that had the same keys,
        also where a device refused one."""
        return self.has(key) or self._most is None or len(self._entries) < self._most

    def entry(self, key: KeyT, *, is_captured: bool = True) -> Entry[BuffersT]:
        """Return the buffers to fill, and the run. Captures a key at its first use, unless this step is to run as it
        is."""
        if self._capture is None or not is_captured:
            self.num_misses += self._capture is not None
            buffers = self._allocate(key)
            return Entry(buffers, lambda: self._forward(key, buffers))
        found = self._entries.get(key)
        if found is not None:
            self.num_hits += 1
            return found
        self.num_misses += 1
        found = self._entries[key] = self._captured(key, self._capture)
        return found

    def release(self) -> None:
        """Forget every shape, and free what it holds; it may be captured again. A communicator cannot be left while a
        graph holds collectives of it."""
        self._entries.clear()
        self._is_refused = False
        self.num_captured, self.capture_seconds, self.capture_bytes = 0, 0.0, 0

    def _captured(self, key: KeyT, capture: Capture) -> Entry[BuffersT]:
        started, held = time.perf_counter(), capture.allocated_bytes()
        buffers = self._allocate(key)

        def work() -> None:
            self._forward(key, buffers)

        work()  # compiles and tunes kernels, which must not happen inside a capture
        replay = None if self._is_refused else self._replay(key, capture, work)
        if replay is None:
            return Entry(buffers, work)
        seconds, num_bytes = time.perf_counter() - started, capture.allocated_bytes() - held
        self.num_captured += 1
        self.capture_seconds += seconds
        self.capture_bytes += num_bytes
        logger.info("captured %s %s: %.2f s, %.1f MiB", self.name, key, seconds, num_bytes / 2**20)
        return Entry(buffers, replay)

    def _replay(self, key: KeyT, capture: Capture, work: Replay) -> Replay | None:
        """The captured work; None from the first refusal on, here or where the peers capture."""
        replay, reason = None, "another rank's device refused"
        try:
            replay = capture(work)
        except CaptureRefused as refusal:
            reason = str(refusal)
        if self._agree(replay is not None):
            return replay
        self._is_refused = True
        logger.warning(
            "%s %s cannot be captured (%s): it runs as it is, and so does what is new from here on",
            self.name, key, reason,
        )  # fmt: skip
        return None


def graph_uses(*runners: GraphRunner[Any, Any]) -> tuple[int, int]:
    """How often a shape had its graph, and how often it was captured first or ran as it is. Without capture neither."""
    return sum(runner.num_hits for runner in runners), sum(runner.num_misses for runner in runners)


def capture_costs(*runners: GraphRunner[Any, Any]) -> dict[str, float]:
    """What these have captured: how many graphs, in how many seconds, holding how many bytes."""
    return {
        "graphs": sum(runner.num_captured for runner in runners),
        "capture_seconds": sum(runner.capture_seconds for runner in runners),
        "capture_bytes": sum(runner.capture_bytes for runner in runners),
    }
