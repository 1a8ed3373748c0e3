"""Answers that are programs are marked beside the decoding; records keep their order and none is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from common.config import InputConfig
from common.scoring import marking_pool
from common.scoring.benchmarks.benchmark import Row
from common.scoring.marking_pool import MarkingPool

SOURCE = InputConfig(path="-", run_generated_code=True)
PROGRAM = {"kind": "code", "entry_point": "f", "inputs": [[1]], "expected": [1]}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Programs are marked once this is set; which one it was becomes its mark."""
    opened = threading.Event()

    def marks(row: Row, text: str, _: InputConfig) -> dict[str, Any]:
        if row.get("kind") == "code":
            opened.wait(60)
        return {"marked": text}

    monkeypatch.setattr(marking_pool, "marks", marks)
    yield opened
    opened.set()


def test_a_program_that_takes_long_holds_nobody_up(gate: threading.Event) -> None:
    pool = MarkingPool(SOURCE)
    pool.put({"id": "slow"}, PROGRAM, "a")
    pool.put({"id": "fast"}, {"final": 1}, "b")
    assert list(pool.done()) == []  # the first is not marked yet, and the second waits for it
    gate.set()
    assert list(pool.rest()) == [{"id": "slow", "marked": "a"}, {"id": "fast", "marked": "b"}]
    assert list(pool.rest()) == []
    pool.close()


def test_a_run_that_is_stopped_waits_a_little_for_marks(gate: threading.Event) -> None:
    pool = MarkingPool(SOURCE)
    pool.put({"id": "slow"}, PROGRAM, "a")
    assert list(pool.rest(0.1)) == []
    threading.Timer(0.2, gate.set).start()
    assert list(pool.rest(60.0)) == [{"id": "slow", "marked": "a"}]
    pool.close()


def test_an_answer_that_is_no_program_is_marked_at_once(gate: threading.Event) -> None:
    pool = MarkingPool(SOURCE)
    pool.put({"id": "one"}, {"final": 1}, "b")
    assert list(pool.done()) == [{"id": "one", "marked": "b"}]
    pool.close()


def test_only_a_few_records_wait(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marking_pool, "_WAITING_PER_THREAD", 2)
    monkeypatch.setattr(marking_pool, "_MOST_THREADS", 1)
    pool = MarkingPool(SOURCE)
    for number in range(3):
        pool.put({"id": number}, PROGRAM, str(number))
    threading.Timer(0.2, gate.set).start()
    assert next(pool.done())["id"] == 0  # waited for it, as three are too many
    pool.close()


def test_programs_are_marked_as_without_a_pool() -> None:
    pool = MarkingPool(SOURCE)
    for number, body in enumerate(["return x", "return x + 1", "raise ValueError", "return x"]):
        pool.put({"id": number}, PROGRAM, f"def f(x):\n    {body}\n")
    assert [record["correct"] for record in pool.rest()] == [True, False, False, True]
    pool.close()
