"""The engine's side: what the front end asks for is decoded, cut, aborted, watched and counted."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.config import DecodeConfig
from common.decoding import (
    DREAM,
    Capacity,
    EngineCore,
    GenerationRequest,
    Int,
    ModelFacts,
    Predictions,
    Scheduler,
    StepPlan,
    decode_requests,
)
from common.decoding.scheduling.scheduler import noise_key
from common.processes import Mesh
from common.serving import link
from common.serving.engine.links import Links
from common.serving.engine.loop import RequestLoop
from common.serving.engine.passes import CountedEngine
from common.serving.link import Link
from common.serving.messages import Abort, Accepted, Add, Counts, Ended, Over, Passed, Rejected, Tokens

MASK, EOS = 1, 0
DECODE = DecodeConfig(num_lookahead=2, block_size=4, max_new_tokens=16, skip_threshold=0.6)


class Chance:
    """common.decoding.Engine: an entry's prediction is a function of its token and position."""

    def __init__(self, num_slots: int) -> None:
        self.mesh = Mesh()
        self.capacity = Capacity(num_slots, 64, vocab_size=100)
        self.num_rows = self.num_forwards = 0
        self.spoilt_key: int | None = None  # whose predictions are no numbers
        self.is_answered = threading.Event()
        self.is_answered.set()

    def forward(self, plan: StepPlan) -> Predictions:
        """Passes after the first wait for the front end, where a test has cleared `is_answered`."""
        if self.num_forwards:
            assert self.is_answered.wait(60)
        self.num_rows += plan.num_rows
        self.num_forwards += 1
        mixed_T = (plan.token_T * 31 + plan.position_T * 17) % 89
        predictions = Predictions.of(
            mixed_T + 3, (mixed_T / 89).astype(np.float32), (mixed_T / 89 - 1).astype(np.float32)
        )
        predictions.values_3T[:, (plan.noise_key_R == self.spoilt_key).repeat(plan.num_entries_R)] = np.nan
        return predictions

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        """It keeps nothing."""

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """It holds nothing."""


class Fixture:
    """A loop whose front end is the test, which acts between the steps."""

    def __init__(self, num_slots: int = 2, decode: DecodeConfig | None = None, facts: ModelFacts = DREAM) -> None:
        here, there = socket.socketpair()
        self.engine = Chance(num_slots)
        counted = CountedEngine(self.engine)
        self.core = EngineCore(scheduler(num_slots, decode or DECODE, facts), counted)
        self.front, self.link = Link(there), Link(here)
        self.loop = RequestLoop(self.core, counted, Links([self.link]))
        self.told: list[Any] = []
        self.num_more = 0  # requests that `then` adds

    @property
    def is_empty(self) -> bool:
        loop, core = self.loop, self.core
        left = loop._served, loop._untold, loop._watched, core._num_given, core._queue.open_ids, core.scheduler.active
        return not any(map(len, left)) and not core.num_waiting

    def run(self, *messages: Any, then: Callable[[Any], list[Any]] = lambda _: []) -> list[Any]:
        """What was told, of all messages and of those that `then` answers what was told with."""
        front = threading.Thread(target=self._ask, args=(messages, then))
        front.start()
        self.loop.run()
        front.join(60)
        return self.told

    def _ask(self, messages: Sequence[Any], then: Callable[[Any], list[Any]]) -> None:
        """Over once all have ended and the engine's counts of that have come."""
        self.front.send(messages)
        num_open = sum(isinstance(message, Add) for message in messages) + self.num_more
        while num_open or not isinstance(self.told[-1], Counts):
            for message in self.front.receive(wait_s=5):
                self.told.append(message)
                if answers := then(message):
                    self.front.send(answers)
                    self.engine.is_answered.set()
                num_open -= isinstance(message, (Ended, Rejected))
        self.front.send([Over()])

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]


def scheduler(num_slots: int, decode: DecodeConfig = DECODE, facts: ModelFacts = DREAM) -> Scheduler:
    return Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=num_slots, facts=facts)


def request(name: str, decode: DecodeConfig | None = None) -> GenerationRequest:
    return GenerationRequest(name, tuple(range(5, 9 + len(name))), decode)


def wanted(*requests: GenerationRequest) -> dict[str, tuple[int, ...]]:
    return {done.id: done.token_ids for done in decode_requests(iter(requests), scheduler(1), Chance(1))}


def tokens_of(told: list[Any], name: str) -> tuple[int, ...]:
    parts = [message.token_ids for message in told if isinstance(message, (Tokens, Ended)) and message.id == name]
    return sum(parts, ())


@pytest.mark.parametrize("num_slots", [1, 2, 6])
def test_all_tokens_come_in_order_and_once(num_slots: int) -> None:
    requests = [request(name) for name in ("a", "bb", "ccc", "dddd", "e")]
    requests[-1] = GenerationRequest("e", (50, 51))
    fixture = Fixture(num_slots)
    told = fixture.run(*(Add(one) for one in requests))
    assert {one.id: tokens_of(told, one.id) for one in requests} == wanted(*requests)
    assert [message.id for message in fixture.of(Accepted)] == [one.id for one in requests]
    assert all(message.num_tokens == len(tokens_of(told, message.id)) for message in fixture.of(Ended))


@pytest.mark.parametrize("most", [1, 3, 5, 15, 16])
def test_an_answer_is_cut_at_its_length(most: int) -> None:
    fixture = Fixture()
    told = fixture.run(Add(replace(request("a"), max_tokens=most)))
    whole = wanted(request("a"))["a"]
    (ended,) = fixture.of(Ended)
    assert tokens_of(told, "a") == whole[:most] and ended.num_tokens == min(most, len(whole))
    assert ended.finish_reason == "length"


def test_an_aborted_request_ends_as_such_and_the_others_go_on() -> None:
    def then(message: Any) -> list[Any]:
        return [Abort("a"), Abort("nobody")] if isinstance(message, Accepted) and message.id == "a" else []

    fixture = Fixture()
    fixture.engine.is_answered.clear()
    told = fixture.run(Add(request("a")), Add(request("bb")), then=then)
    reasons = {message.id: message.finish_reason for message in fixture.of(Ended)}
    assert reasons == {"a": "abort", "bb": "length"}
    assert tokens_of(told, "bb") == wanted(request("bb"))["bb"]
    assert not fixture.core.scheduler.active and fixture.core.num_waiting == 0


def test_what_cannot_be_decoded_is_rejected_and_nothing_ends() -> None:
    fixture = Fixture()
    hot = DECODE.model_copy(update={"window_attention": "block_causal"})
    strange = GenerationRequest("strange", (5, 1000))
    told = fixture.run(Add(request("a")), Add(request("a")), Add(request("b", hot)), Add(strange))
    reasons = [message.reason for message in fixture.of(Rejected)]
    assert "is still being answered" in reasons[0] and "window_attention" in reasons[1] and "1000" in reasons[2]
    assert tokens_of(told, "a") == wanted(request("a"))["a"]


def test_a_request_that_fails_is_told_so_and_the_others_go_on() -> None:
    fixture = Fixture()
    fixture.engine.spoilt_key = noise_key(0, "bad")
    told = fixture.run(Add(request("bad"), True), Add(request("bb")), Add(request("c")))
    (rejected,) = fixture.of(Rejected)
    assert (rejected.id, rejected.status) == ("bad", 500) and "not finite" in rejected.reason
    for one in (request("bb"), request("c")):
        assert tokens_of(told, one.id) == wanted(one)[one.id]
    assert not fixture.of(Passed), "a pass that has failed shows nothing"
    assert fixture.is_empty


def test_a_late_abort_ends_no_later_request_of_that_id() -> None:
    """The front end asks for it before it hears of the end, and adds the next request when it has."""
    ends: list[Ended] = []

    def then(message: Any) -> list[Any]:
        if not isinstance(message, Ended) or len(ends) == 3:
            return []
        ends.append(message)
        return [Abort("a"), Add(request("a"))]

    fixture = Fixture()
    fixture.num_more = 3
    fixture.run(Add(request("a")), then=then)
    assert [ended.finish_reason for ended in fixture.of(Ended)] == ["length"] * 4 and fixture.is_empty


def test_passes_are_told_of_watched_requests_only() -> None:
    fixture = Fixture()
    fixture.run(Add(request("a"), True), Add(request("bb")))
    ended = {message.id: message.num_forwards for message in fixture.of(Ended)}
    assert [message.record.request_id for message in fixture.of(Passed)] == ["a"] * ended["a"]
    assert fixture.core.scheduler._requests.observer is None, "nobody looks any more"


def test_counts_are_those_of_the_passes() -> None:
    fixture = Fixture()
    fixture.run(Add(request("a")), Add(request("bb")))
    counts, ended = fixture.of(Counts)[-1], fixture.of(Ended)
    assert sum(counts.forwards.values()) == fixture.engine.num_forwards == sum(counts.tokens_histogram)
    assert counts.num_rows == fixture.engine.num_rows == sum(counts.windows_histogram)
    assert sum(counts.wins.values()) == sum(message.num_forwards for message in ended)
    won = sum(count for branch, count in counts.wins.items() if branch != "anchor")
    assert won == sum(message.num_lookahead_wins for message in ended)
    assert (counts.num_running_now, counts.num_waiting_now, counts.kv_usage) == (0, 0, 0)
    assert counts.num_blocks * 4 < counts.num_committed


@pytest.mark.parametrize("prompt_length", [3, 8, 10])
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("d2f", {}),
        ("fast_dllm", {}),
        ("block_diffusion", {"commit": "separate"}),
        ("fast_dllm_v2", {"cache": "dual", "sub_block_size": 2}),
    ],
)
def test_blocks_are_counted_once_their_kv_is_final(strategy: str, more: dict[str, Any], prompt_length: int) -> None:
    settings = {"strategy": {"name": strategy, **more}, "block_size": 4, "max_new_tokens": 16, "eos_token_id": -1}
    decode = DecodeConfig.model_validate(settings)
    fixture = Fixture(2, decode, ModelFacts(0 if strategy == "block_diffusion" else 1))
    fixture.run(Add(GenerationRequest("a", tuple(range(5, 5 + prompt_length)))))
    counts = fixture.of(Counts)[-1]
    shared = prompt_length % 4 if strategy not in ("d2f", "fast_dllm") else 0
    blocks = {
        "d2f": 3,  # the last one's KV is never needed
        "fast_dllm": 0,
        "block_diffusion": -(-(16 + shared) // 4),
        "fast_dllm_v2": -(-(16 + shared) // 4) - 1,
    }
    assert counts.num_blocks == blocks[strategy]
    whole = {"d2f": prompt_length, "fast_dllm": 0}.get(strategy, prompt_length - shared)
    assert counts.num_committed == whole + 4 * blocks[strategy]


def test_a_front_end_that_lags_loses_its_streams_of_passes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end reads nothing until all that it has asked for has ended, and then goes on as ever."""
    monkeypatch.setattr(link, "_BEHIND_BYTES", 500)
    long = DECODE.model_copy(update={"max_new_tokens": 48, "skip_threshold": 1.0})
    fixture = Fixture(3, long)
    for end in (fixture.link, fixture.front):
        end._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    names = ["watched", "too", "plain", "waits"]
    whole = {
        one.id: done for one in map(request, names) for done in decode_requests([one], scheduler(1, long), Chance(1))
    }

    def ask(messages: Sequence[Any], then: Callable[[Any], list[Any]]) -> None:
        fixture.front.send(messages)
        deadline = time.monotonic() + 60
        while not fixture.engine.num_forwards or fixture.core.has_work:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(fixture.link._unsent) < 200_000, "what waits is bounded by what is open"
        while fixture.link._unsent:
            read = fixture.front.receive(wait_s=5)
            fixture.told += read
            fixture.num_more -= sum(isinstance(message, (Ended, Rejected)) for message in read)
        monkeypatch.setattr(link, "_BEHIND_BYTES", 2**22)  # however slowly this thread reads from here on
        fixture.front.send([Add(request("later"), True)])
        Fixture._ask(fixture, [], then)

    fixture._ask = ask  # type: ignore[method-assign]
    fixture.num_more = len(names) + 1
    told = fixture.run(*(Add(request(name), name in ("watched", "too")) for name in names))
    lost = {message.id: message for message in fixture.of(Rejected)}
    assert set(lost) == {"watched", "too"} and all(message.status == 503 for message in lost.values())
    for name in ("plain", "waits"):
        assert tokens_of(told, name) == whole[name].token_ids
        assert sum(isinstance(message, Tokens) and message.id == name for message in told) < 10, "they wait together"
    assert {message.record.request_id for message in fixture.of(Passed)} >= {"later"}
    assert {message.id for message in fixture.of(Ended)} == {"plain", "waits", "later"} and fixture.is_empty


def test_a_front_end_that_lags_costs_the_clients_of_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fixture = Fixture(2)
    here, there = socket.socketpair()
    lagging, other = Link(here), Link(there)
    fixture.loop.link = Links([lagging, fixture.link])
    lagging.send([Rejected("x", "y" * 5 * 2**20)])
    other.send([Add(request("late"), True)])

    def then(message: Any) -> list[Any]:
        if isinstance(message, (Ended, Rejected)):
            other.send([Over()])
        return []

    told = fixture.run(Add(request("a"), True), then=then)
    (ended,) = fixture.of(Ended)
    assert len(fixture.of(Passed)) == ended.num_forwards and fixture.of(Tokens)
    assert tokens_of(told, "a") == wanted(request("a"))["a"] and not fixture.of(Rejected)
    assert [record.args[0] for record in caplog.records if record.args] == ["late"]
