"""Orders amid answers: no answer is of two versions of the weights, none is lost, and what cannot be is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.decoding import (
    DropWeights,
    EngineCore,
    ForgetKV,
    Order,
    Predictions,
    PutWeights,
    ReadWeights,
    Rejection,
    ReleaseMemory,
    ResumeMemory,
    StepPlan,
    Tag,
    decode_requests,
)
from common.errors import ConfigError, EngineError
from common.serving.engine.control import Control
from common.serving.engine.passes import CountedEngine
from common.serving.messages import Ask, Continue, Obeyed, Pause
from tests.unit.serving.test_request_loop import Chance, request, scheduler

NAMES = ("a", "bb", "ccc", "dddd")


class Versioned(Chance):
    """An engine whose weights are a number, which its predictions follow. A folder is that number, written out."""

    def __init__(self, num_slots: int, weights: int = 0) -> None:
        super().__init__(num_slots)
        self.weights, self.weight_version = weights, "0"
        self.read: int | None = None
        self.released: frozenset[Tag] = frozenset()

    def forward(self, plan: StepPlan) -> Predictions:
        predictions = super().forward(plan)
        predictions.values_3T[0] = (predictions.values_3T[0] + 7 * self.weights) % 80 + 3
        return predictions

    def obey(self, order: Order) -> None:
        if isinstance(order, ReadWeights):
            if not str(order.source).isdecimal():
                raise ConfigError(f"{order.source}: does not fit")
            self.read = int(str(order.source))
        elif isinstance(order, PutWeights):
            assert self.read is not None
            self.weights, self.read = self.read, None
            self.weight_version = order.version or str(int(self.weight_version) + 1)
        elif isinstance(order, ReleaseMemory):
            self.released |= set(order.tags)
        elif isinstance(order, ResumeMemory):
            self.released -= set(order.tags)
        elif not isinstance(order, ForgetKV):
            self.read = None


def texts(weights: int) -> dict[str, tuple[int, ...]]:
    """The answers of an engine that was started with these weights."""
    done = decode_requests(iter([request(name) for name in NAMES]), scheduler(1), Versioned(1, weights))
    return {one.id: one.token_ids for one in done}


class Engine:
    """The server's loop as it goes round, a turn at a time."""

    def __init__(self, *names: str, in_force: Path | None = None) -> None:
        self.device = Versioned(2)
        counted = CountedEngine(self.device)
        self.core = EngineCore(scheduler(2), counted)
        counted.rooms = self.core.scheduler.rooms
        self.open: set[str] = set()
        self.ended: dict[str, tuple[str, tuple[int, ...]]] = {}  # version and tokens; those of an abort are none
        self.control = Control(self.core, counted, lambda: tuple(sorted(self.open)), in_force)
        self.told: list[Obeyed] = []
        self.add(*names)

    def add(self, *names: str) -> None:
        for name in names:
            self.core.add_request(request(name))
            self.open.add(name)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.core.step() if self.core.has_work else []:
                if output.result is not None:
                    assert not isinstance(output.result, Rejection)
                    is_whole = output.result.finish_reason != "abort"
                    self.ended[output.id] = self.device.weight_version, output.result.token_ids if is_whole else ()
                    self.open.discard(output.id)
            self.told += self.control.go_on()

    def ask(self, what: Any, key: str = "call", **how: Any) -> None:
        self.control.take(Ask(key, what, **how))

    def obeyed(self) -> str | None:
        """Go on until something that was asked has been done, and return what stood in its way."""
        for _ in range(200):
            if self.told:
                return self.told.pop(0).problem
            self.turn()
        raise AssertionError("it is never done")

    def answer_to(self, what: Any, key: str = "call", **how: Any) -> str | None:
        self.ask(what, key, **how)
        return self.obeyed()

    def finish(self) -> None:
        for _ in range(200):
            self.turn()
        assert not self.open

    @property
    def is_amid(self) -> bool:
        return bool(self.core.scheduler.active)


def test_what_has_begun_is_of_the_old_weights_and_what_waits_of_the_new() -> None:
    engine = Engine(*NAMES)
    engine.turn(3)
    assert engine.is_amid
    assert engine.answer_to(ReadWeights("1")) is None
    assert set(engine.ended) == {"a", "bb"}, "nothing begins from here on"
    engine.turn(20)
    assert engine.device.weights == 0 and engine.open == {"ccc", "dddd"}
    engine.ask(PutWeights())
    engine.finish()
    old, new = texts(0), texts(1)
    assert not any(old[name] == new[name] for name in NAMES)
    assert engine.ended == {name: ("0", old[name]) for name in ("a", "bb")} | {
        name: ("1", new[name]) for name in ("ccc", "dddd")
    }


def test_requests_are_aborted_where_that_is_asked_for() -> None:
    engine = Engine(*NAMES)
    engine.turn(3)
    assert engine.answer_to(ReadWeights("1"), is_aborting=True) is None
    assert engine.ended == dict.fromkeys(NAMES, ("0", ()))
    engine.ask(PutWeights("one"))
    engine.add("a")
    engine.finish()
    assert engine.ended["a"] == ("one", texts(1)["a"])


def test_what_does_not_fit_leaves_the_old_weights_in_force_and_holds_nobody() -> None:
    engine = Engine(*NAMES)
    engine.turn(3)
    assert engine.answer_to(ReadWeights("model")) == "model: does not fit"
    engine.finish()
    assert engine.ended == {name: ("0", tokens) for name, tokens in texts(0).items()}


def test_a_second_call_waits_for_its_turn_elsewhere() -> None:
    engine = Engine()
    assert engine.answer_to(ReadWeights("1"), "first") is None
    assert "replaced by another call" in str(engine.answer_to(ReadWeights("2"), "second"))
    assert engine.answer_to(PutWeights(), "first") is None and engine.device.weights == 1


def test_a_pause_in_place_stops_answers_amid_and_no_weights_are_replaced_there() -> None:
    engine = Engine(*NAMES)
    engine.turn(3)
    assert engine.answer_to(Pause("in_place")) is None
    num_passes = engine.device.num_forwards
    engine.turn(20)
    assert engine.device.num_forwards == num_passes and engine.is_amid
    assert "two versions of the weights would mix" in str(engine.answer_to(ReadWeights("1")))
    assert "two versions" in str(engine.answer_to(ReleaseMemory()))
    engine.ask(Continue())
    engine.finish()
    assert engine.ended == {name: ("0", tokens) for name, tokens in texts(0).items()}


def test_a_pause_that_waits_lets_nothing_begin() -> None:
    engine = Engine(*NAMES)
    engine.turn(3)
    assert engine.answer_to(Pause("wait")) is None
    engine.turn(20)
    assert set(engine.ended) == {"a", "bb"}
    for order in (ReadWeights("1"), PutWeights()):
        assert engine.answer_to(order) is None
    engine.turn(20)
    assert engine.open == {"ccc", "dddd"}, "the pause goes on after the replacement"
    engine.ask(Continue())
    engine.finish()
    assert engine.ended["ccc"] == ("1", texts(1)["ccc"])


def test_a_pause_ends_what_is_open_unless_told_otherwise() -> None:
    engine = Engine(*NAMES)
    engine.turn(3)
    assert engine.answer_to(Pause()) is None
    assert engine.ended == dict.fromkeys(NAMES, ("0", ()))
    engine.add("a")
    engine.turn(20)
    assert engine.open == {"a"}, "it waits for the end of the pause"
    engine.ask(Continue())
    engine.finish()
    assert engine.ended["a"] == ("0", texts(0)["a"])


def test_a_pause_that_another_call_ends_is_told_so() -> None:
    engine = Engine("a")
    engine.turn(3)
    engine.ask(Pause("wait"), "first")
    engine.turn()
    engine.ask(Continue(), "second")
    assert {engine.obeyed(), engine.obeyed()} == {None, "another call has continued, or paused in another mode"}
    engine.finish()


@pytest.mark.parametrize("tags", [("weights",), ("kv_cache",), ("weights", "kv_cache")])
def test_requests_wait_until_all_memory_is_there_again(tags: tuple[Tag, ...]) -> None:
    engine = Engine("a")
    engine.turn(3)
    assert engine.answer_to(ReleaseMemory(tags)) is None
    assert engine.ended["a"] == ("0", texts(0)["a"])
    engine.add("bb")
    for tag in tags:
        engine.turn(20)
        assert engine.open == {"bb"}
        assert engine.answer_to(ResumeMemory((tag,))) is None
    engine.finish()
    assert engine.ended["bb"] == ("0", texts(0)["bb"])


def test_the_cache_is_flushed_between_requests_only() -> None:
    engine = Engine("a")
    engine.turn(3)
    assert "are being decoded" in str(engine.answer_to(ForgetKV()))
    engine.finish()
    assert engine.answer_to(ForgetKV()) is None


def test_a_replica_that_comes_again_has_the_weights_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "in_force"
    engine = Engine(in_force=path)
    engine.control.catch_up()
    assert engine.device.weights == 0, "nothing has been replaced"
    for order in (ReadWeights("2"), PutWeights("two")):
        assert engine.answer_to(order) is None
    again = Engine("a", in_force=path)
    again.control.catch_up()
    again.finish()
    assert again.ended["a"] == ("two", texts(2)["a"])
    path.write_text('["gone", "two"]')
    with pytest.raises(EngineError, match="cannot be read again: gone: does not fit"):
        Engine(in_force=path).control.catch_up()


def test_a_replica_that_has_not_read_says_so_and_goes_on() -> None:
    """The replica was started again between reading and putting in force, which the call that asks cannot know."""
    engine = Engine(*NAMES)
    for order in (PutWeights(), DropWeights()):
        assert "started again" in str(engine.answer_to(order))
    engine.finish()
    assert {name for name, (version, tokens) in engine.ended.items() if version == "0" and tokens} == set(NAMES)


def test_an_engine_that_takes_no_orders_says_so() -> None:
    counted = CountedEngine(Chance(1))
    core = EngineCore(scheduler(1), counted)
    control = Control(core, counted, tuple)
    control.take(Ask("call", ReadWeights("1")))
    control.go_on()
    core.step()
    (told,) = control.go_on()
    assert told.problem is not None and "keeps its weights and its memory" in told.problem
