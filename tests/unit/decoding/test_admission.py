"""Requests wait while the engine has no room for them, keep their order, and are rejected only if they never could
run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.config import DecodeConfig
from common.decoding import (
    Capacity,
    Completion,
    EngineCore,
    GenerationRequest,
    Predictions,
    Rejection,
    Room,
    Scheduler,
    StepPlan,
    decode_requests,
)
from common.decoding.request import RequestQueue
from common.processes import Mesh

DECODE = DecodeConfig(num_lookahead=0, block_size=4, max_new_tokens=8)


@dataclass(frozen=True, slots=True)
class SmallMemory(Capacity):
    num_positions: int = 0

    def can_hold(self, rooms: Sequence[Room]) -> bool:
        return sum(room.prompt_length + room.decode.max_new_tokens for room in rooms) <= self.num_positions


class ConfidentEngine:
    """Fills everything at once; notes how many requests were in each step."""

    mesh = Mesh()

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.num_requests: list[int] = []

    def forward(self, plan: StepPlan) -> Predictions:
        self.num_requests.append(len(np.unique(plan.request_R)))
        ones = np.ones(plan.token_T.shape, dtype=np.float32)
        return Predictions.of(np.full(plan.token_T.shape, 7), ones, ones)

    def commit(self, plan: StepPlan, winner_row_of_request: np.ndarray) -> None:
        pass


def decode(engine: ConfidentEngine, *prompt_lengths: int) -> list[Completion | Rejection]:
    scheduler = Scheduler(DECODE, mask_token_id=1, eos_token_id=2, num_slots=engine.capacity.num_slots)
    requests = (GenerationRequest(str(n), (9,) * length) for n, length in enumerate(prompt_lengths))
    return list(decode_requests(requests, scheduler, engine))


def test_requests_wait_for_memory_in_their_order() -> None:
    engine = ConfidentEngine(SmallMemory(num_slots=8, max_model_len=100, num_positions=40))
    results = decode(engine, 10, 12, 20, 5, 5)
    assert [result.id for result in results] == ["0", "1", "2", "3", "4"]
    assert all(isinstance(result, Completion) for result in results)
    assert max(engine.num_requests) == 2


def test_an_input_is_read_ahead_as_far_as_is_asked_and_as_it_has_now() -> None:
    requests = [GenerationRequest(str(n), (9,)) for n in range(4)]
    queue = RequestQueue([*requests[:2], None, *requests[2:]])
    queue.prefetch(1)
    assert list(queue) == requests[:1]
    queue.prefetch(3)  # "nothing now" after the second
    assert list(queue) == requests[:2]
    queue.prefetch(3)
    assert list(queue) == requests[:3]


@dataclass(frozen=True, slots=True)
class AskedMemory(SmallMemory):
    num_rooms: list[int] = field(default_factory=list)

    def can_hold(self, rooms: Sequence[Room]) -> bool:
        self.num_rooms.append(len(rooms))
        return SmallMemory.can_hold(self, rooms)


@pytest.mark.parametrize(("num_positions", "most_at_once"), [(8 * 18, 8), (3 * 18, 3)])
def test_memory_is_asked_once_for_all_that_come_where_it_holds_them(num_positions: int, most_at_once: int) -> None:
    """Asking for each beside all that are decoded takes longer the more there are."""
    capacity = AskedMemory(num_slots=8, max_model_len=100, num_positions=num_positions)
    scheduler = Scheduler(DECODE, mask_token_id=1, eos_token_id=2, num_slots=8)
    engine = ConfidentEngine(capacity)
    core = EngineCore(scheduler, engine)
    for n in range(16):
        core.add_request(GenerationRequest(str(n), (9,) * 10))
    while core.has_work:
        core.step()
    assert max(engine.num_requests) == most_at_once
    beside_others = [count for count in capacity.num_rooms if count > 1]
    assert len(beside_others) == 2 if most_at_once == 8 else max(beside_others) == 8


def test_without_a_limit_of_memory_the_slots_are_filled() -> None:
    engine = ConfidentEngine(Capacity(num_slots=4, max_model_len=100))
    decode(engine, 10, 12, 20, 5, 5)
    assert engine.num_requests[0] == 4


def test_a_request_that_never_fits_is_rejected_and_the_rest_goes_on() -> None:
    engine = ConfidentEngine(SmallMemory(num_slots=8, max_model_len=100, num_positions=40))
    results = {result.id: result for result in decode(engine, 10, 33, 93, 0, 12)}
    assert isinstance(results["0"], Completion) and isinstance(results["4"], Completion)
    reasons = [results[name].reason for name in "123"]
    assert "lower max_new_tokens or num_lookahead" in reasons[0]
    assert "92 fit beside max_new_tokens 8" in reasons[1]
    assert "empty" in reasons[2]


@pytest.mark.parametrize("strategy", ["d2f", "block_diffusion"])
@pytest.mark.parametrize("max_model_len", [32, 35])
def test_the_longest_prompt_is_the_last_that_fits(strategy: str, max_model_len: int) -> None:
    settings = DecodeConfig.model_validate({"strategy": strategy, "block_size": 8, "max_new_tokens": 9})
    longest = Room(1, settings).longest_prompt(max_model_len)
    assert Room(longest, settings).num_positions <= max_model_len < Room(longest + 1, settings).num_positions


class QueueingEngine(ConfidentEngine):
    """Notes what happens between a launch and its result."""

    def __init__(self, capacity: Capacity, events: list[str]) -> None:
        super().__init__(capacity)
        self.events = events

    def launch(self, plan: StepPlan) -> None:
        self.events.append("launch")
        self.plan = plan

    def receive(self) -> Predictions:
        self.events.append("receive")
        return super().forward(self.plan)


def read(events: list[str], num_requests: int) -> Iterator[GenerationRequest]:
    for n in range(num_requests):
        events.append(f"read {n}")
        yield GenerationRequest(str(n), (9,) * 5)


def test_results_are_written_and_requests_read_while_the_device_computes() -> None:
    events: list[str] = []
    engine = QueueingEngine(Capacity(num_slots=1, max_model_len=100), events)
    scheduler = Scheduler(DECODE, mask_token_id=1, eos_token_id=2)
    results = []
    for result in decode_requests(read(events, 3), scheduler, engine):
        events.append(f"write {result.id}")
        results.append(result)
    alone = decode(ConfidentEngine(engine.capacity), 5, 5, 5)
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]  # type: ignore[union-attr]
    under_way = [events[start : start + events[start:].index("receive")] for start in _indices(events, "launch")]
    meanwhile = [event for part in under_way for event in part[1:]]
    assert meanwhile == ["read 1", "write 0", "read 2", "write 1"]
    assert events[0] == "read 0" and events[-1] == "write 2"


def test_what_has_ended_is_written_even_if_the_next_step_cannot_begin() -> None:
    engine = QueueingEngine(Capacity(num_slots=1, max_model_len=100), [])
    scheduler = Scheduler(DECODE, mask_token_id=1, eos_token_id=2)
    results = decode_requests(read([], 2), scheduler, engine)

    def fail(plan: StepPlan) -> None:
        if scheduler.active[0].request.id == "1":
            raise RuntimeError("out of memory")
        engine.plan = plan

    engine.launch = fail  # type: ignore[method-assign]
    assert next(results).id == "0"
    with pytest.raises(RuntimeError, match="out of memory"):
        next(results)


def _indices(events: list[str], name: str) -> list[int]:
    return [place for place, event in enumerate(events) if event == name]
