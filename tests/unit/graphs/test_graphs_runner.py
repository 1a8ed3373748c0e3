"""A runner captures each shape once, replays it on the same buffers, and without capture runs every time afresh."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from graphs.runner import CaptureRefused, GraphRunner, Replay, graph_uses


class Recorder:
    """A capture that replays by calling, and counts."""

    def __init__(self) -> None:
        self.num_captured = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        return work

    def allocated_bytes(self) -> int:
        return 0


def doubling(capture: Recorder | None) -> GraphRunner[int, list[int]]:
    def forward(key: int, buffers: list[int]) -> None:
        buffers[1] = 2 * buffers[0]

    return GraphRunner("doubling", lambda key: [0] * key, forward, capture)


def test_a_shape_is_captured_once_and_keeps_its_buffers() -> None:
    capture = Recorder()
    runner = doubling(capture)
    first = runner.entry(2)
    first.buffers[0] = 21
    first.run()
    assert first.buffers[1] == 42
    assert runner.entry(2) is first
    assert capture.num_captured == runner.num_captured == 1
    runner.entry(3)
    assert capture.num_captured == 2
    runner.entry(4, is_captured=False)
    assert graph_uses(runner, doubling(None)) == (1, 3)


def test_without_capture_every_run_has_its_own_buffers() -> None:
    runner = doubling(None)
    entries = [runner.entry(2), runner.entry(2)]
    entries[0].buffers[0] = 4
    for entry in entries:
        entry.run()
    assert [entry.buffers for entry in entries] == [[4, 8], [0, 0]]
    assert runner.num_captured == 0


def test_a_shape_that_is_not_to_be_captured_runs_as_it_is() -> None:
    capture = Recorder()
    doubling(capture).entry(2, is_captured=False).run()
    assert capture.num_captured == 0


def test_work_runs_before_it_is_captured() -> None:
    order: list[str] = []

    class Watching(Recorder):
        def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
            order.append("capture")
            return super().__call__(work)

    GraphRunner("order", lambda key: None, lambda key, buffers: order.append("work"), Watching()).entry(1)
    assert order == ["work", "capture"]


class Refuser(Recorder):
    """Has room for one graph."""

    def __call__(self, work: Replay) -> Replay:
        if self.num_captured:
            raise CaptureRefused("207008")
        return super().__call__(work)


def test_what_a_device_refuses_runs_as_it_is_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = doubling(Refuser())
    with caplog.at_level(logging.WARNING):
        entries = [runner.entry(key) for key in (2, 3, 4)]
    entries[2].buffers[0] = 4
    entries[2].run()
    assert entries[2].buffers[1] == 8 and runner.entry(4) is entries[2]
    assert runner.num_captured == 1
    assert [record.getMessage() for record in caplog.records] == [
        "doubling 3 cannot be captured (207008): it runs as it is, and so does what is new from here on"
    ]


def test_room_is_a_matter_of_keys_and_not_of_what_a_device_refused() -> None:
    """Ranks whose devices differ go on choosing the same shapes."""
    runners = [
        GraphRunner("r", lambda key: [0] * key, lambda *_: None, capture, most=2) for capture in (Recorder(), Refuser())
    ]
    for runner in runners:
        runner.entry(2)
        assert runner.has_room(3)
        runner.entry(3)
        assert runner.has_room(3) and runner.has(3) and not runner.has_room(4)


def test_what_the_peers_could_not_capture_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """The graph that this process made of it is dropped, and nobody is asked again."""
    capture, asked = Recorder(), []

    def agree(is_captured: bool) -> bool:
        asked.append(is_captured)
        return len(asked) == 1

    runner = GraphRunner("r", lambda key: [0] * key, lambda *_: None, capture, agree=agree)
    with caplog.at_level(logging.WARNING):
        for key in (2, 3, 4, 2):
            runner.entry(key)
    assert asked == [True, True] and runner.num_captured == 1 and capture.num_captured == 2
    assert [record.getMessage() for record in caplog.records] == [
        "r 3 cannot be captured (another rank's device refused): it runs as it is, and so does what is new from here on"
    ]


def test_after_a_release_a_device_that_refused_is_asked_again() -> None:
    asked: list[bool] = []

    def agree(is_captured: bool) -> bool:
        asked.append(is_captured)
        return len(asked) > 1

    runner = GraphRunner("r", lambda key: [0] * key, lambda *_: None, Recorder(), agree=agree)
    runner.entry(2)
    assert runner.num_captured == 0
    runner.release()
    runner.entry(2)
    assert runner.num_captured == 1 and asked == [True, True]
