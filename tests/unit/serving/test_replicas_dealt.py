"""Requests over several replicas: who gets which, what becomes of them where one ends, and who shares a replica."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from common.config import DecodeConfig
from common.serving.engine.links import Links
from common.serving.http.engines.client import EngineClient, QueueFull
from common.serving.http.errors import ApiError
from common.serving.link import Link
from common.serving.messages import Abort, AbortCall, Aborted, Accepted, Add, Counts, Ended, Failed, Over, Ready, Tokens
from tests.unit.serving.test_front_end import order

READY = Ready(DecodeConfig(), num_slots=2, max_model_len=64, vocab_size=10)
Talk = Callable[[EngineClient, list[Link]], Coroutine[Any, Any, None]]


def with_replicas(count: int, talk: Talk, max_queued: int = 8) -> None:
    """Run `talk(client, engines)`, where all of the replicas are ready."""

    async def run() -> None:
        client = EngineClient(max_queued, lambda *_: None, num_replicas=count, num_front_ends=2)
        engines, reading = [], []
        for number in range(count):
            here, there = socket.socketpair()
            engines.append(Link(there))
            reading.append(asyncio.ensure_future(client.follow(*await asyncio.open_connection(sock=here), number)))
            engines[-1].send([READY])
        client.is_loaded = True
        await until(lambda: all(replica.state == "ready" for replica in client.replicas))
        await talk(client, engines)
        for engine in engines:
            engine._socket.close()
        await asyncio.gather(*reading)

    asyncio.run(asyncio.wait_for(run(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def where(client: EngineClient) -> list[list[str]]:
    return [[name.split("-")[1] for name in replica.answers] for replica in client.replicas]


def test_requests_go_where_the_fewest_are_and_take_turns_where_that_is_equal() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        for name in "abcd":
            client.submit([order(name)])
        assert where(client) == [["a", "c"], ["b", "d"]]
        for name in ("cmpl-b-0", "cmpl-d-0"):
            engines[1].send([Accepted(name), Ended(name, (4,), "eos", 1)])
        await until(lambda: client.num_open == 2)
        client.submit([order("e"), order("f"), order("g")])
        assert where(client) == [["a", "c", "g"], ["e", "f"]]

    with_replicas(2, talk)


def test_what_other_front_ends_have_there_counts() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        engines[0].send([Counts(num_running_now=2, num_waiting_now=1)])
        await until(lambda: client.replicas[0].num_others == 3)
        client.submit([order("a"), order("b"), order("c")])
        assert where(client) == [[], ["a", "b", "c"]]
        with pytest.raises(QueueFull):
            client.submit([order(f"x{n}") for n in range(7)])

    with_replicas(2, talk)


def test_what_a_lost_replica_had_not_begun_goes_elsewhere_and_the_rest_ends() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        answers = client.submit([order(name) for name in "abcdef"])
        assert where(client) == [["a", "c", "e"], ["b", "d", "f"]]
        engines[1].send([Accepted("cmpl-b-0"), Tokens("cmpl-b-0", (3,)), Accepted("cmpl-d-0")])
        await answers[1].accepted()
        engines[0].receive(wait_s=60)
        engines[1]._socket.close()
        with pytest.raises(ApiError, match="replica 1 has ended") as refused:
            _ = [part async for part in answers[1].parts()]
        assert refused.value.status == 500
        moved = [message.request.id for message in engines[0].receive(wait_s=60)]
        assert moved == ["cmpl-d-0", "cmpl-f-0"] and where(client) == [["a", "c", "e", "d", "f"], []]
        client.require_ready()
        engines[0].send([Accepted("cmpl-d-0"), Ended("cmpl-d-0", (5,), "eos", 1)])
        assert [part.token_ids async for part in answers[3].parts()] == [(5,)]

    with_replicas(2, talk)


def test_a_request_moves_once_since_it_may_be_what_ends_a_replica() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        (answer,) = client.submit([order("a")])
        engines[0].send([Failed("out of memory")])
        await until(lambda: answer.replica == 1)
        engines[1].send([Failed("out of memory again")])
        with pytest.raises(ApiError, match="out of memory again"):
            await answer.accepted()
        assert where(client) == [[], [], []] and client.state == "ready"

    with_replicas(3, talk)


def test_with_no_replica_left_requests_are_told_to_come_again() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        (answer,) = client.submit([order("a")])
        for engine in reversed(engines):
            engine._socket.close()
        with pytest.raises(ApiError) as refused:
            await answer.accepted()
        assert refused.value.status == 503
        await until(lambda: client.state == "dead")
        with pytest.raises(ApiError, match="they are started again"):
            client.require_alive()

    with_replicas(2, talk)


def test_a_replica_that_comes_again_takes_requests() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        engines[0]._socket.close()
        await until(lambda: client.replicas[0].state == "dead")
        here, there = socket.socketpair()
        again = asyncio.ensure_future(client.follow(*await asyncio.open_connection(sock=here), 0))
        await until(lambda: client.replicas[0].state == "loading")
        client.submit([order("a")])
        assert where(client) == [[], ["a"]]
        Link(there).send([READY])
        await until(lambda: client.replicas[0].state == "ready")
        client.submit([order("b")])
        assert where(client) == [["b"], ["a"]] and client.replicas[0].num_ends == 1
        there.close()
        await again

    with_replicas(2, talk)


def test_an_abort_counts_those_of_all_replicas() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        asking = asyncio.ensure_future(client.abort_call(None))
        await asyncio.sleep(0)
        for engine, count in zip(engines, (2, 3), strict=True):
            (asked,) = engine.receive(wait_s=60)
            engine.send([Aborted(asked.number, count)])
        assert await asking == 5

    with_replicas(2, talk)


def test_an_abort_counts_a_replica_that_ends_once() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        asking = asyncio.ensure_future(client.abort_call(None))
        await asyncio.sleep(0)
        numbers = [engine.receive(wait_s=60)[0].number for engine in engines]
        engines[0].send([Aborted(numbers[0], 2)])
        engines[0]._socket.shutdown(socket.SHUT_WR)
        await until(lambda: client.replicas[0].state == "dead")
        engines[1].send([Aborted(numbers[1], 3)])
        engines[2].send([Aborted(numbers[2], 4)])
        assert await asking == 2 + 3 + 4

    with_replicas(3, talk)


def test_an_abort_waits_for_no_replica_that_has_ended() -> None:
    async def talk(client: EngineClient, engines: list[Link]) -> None:
        asking = asyncio.ensure_future(client.abort_call(None))
        await asyncio.sleep(0)
        number = engines[1].receive(wait_s=60)[0].number
        engines[0]._socket.close()
        engines[1].send([Aborted(number, 3)])
        assert await asking == 3

    with_replicas(2, talk)


def fronts() -> tuple[Links, Link, Link]:
    """A replica's end of the links to two front ends, and theirs."""
    pairs = [socket.socketpair() for _ in range(2)]
    return Links([Link(here) for here, _ in pairs]), Link(pairs[0][1]), Link(pairs[1][1])


def test_each_front_end_hears_of_its_own_requests_and_of_the_engine() -> None:
    links, one, other = fronts()
    one.send([Add(order("a").request)])
    other.send([Add(order("b").request)])
    asked: list[Any] = []
    while len(asked) < 2:
        asked += links.receive(wait_s=60)
    links.send([Accepted("cmpl-a-0"), Counts(), Tokens("cmpl-b-0", (3,)), Ended("cmpl-a-0", (4,), "eos", 1)])
    assert [type(message) for message in one.receive(wait_s=60)] == [Accepted, Counts, Ended]
    assert [type(message) for message in other.receive(wait_s=60)] == [Counts, Tokens]


def test_what_a_front_end_has_not_read_holds_back_no_other() -> None:
    links, one, other = fronts()
    one.send([Add(order("a").request)])
    other.send([Add(order("b").request)])
    asked: list[Any] = []
    while len(asked) < 2:
        asked += links.receive(wait_s=60)
    links.send([Tokens("cmpl-a-0", (3,) * 2**23)])
    assert links.is_behind("cmpl-a-0") and not links.is_behind("cmpl-b-0") and not links.is_behind("nobody")
    for count in (1, 2):
        links.send([Counts(num_rows=count), Accepted("cmpl-b-0")])
        assert other.receive(wait_s=60) == [Counts(num_rows=count), Accepted("cmpl-b-0")]
    found: list[Any] = []
    while len(found) < 2:
        found += one.receive()
        links.send([])
    assert [type(message) for message in found] == [Tokens, Counts] and found[1].num_rows == 2
    assert not links.is_behind("cmpl-a-0") and other.receive() == []


def test_an_open_id_belongs_to_one_front_end() -> None:
    links, one, other = fronts()
    one.send([Add(order("a").request)])
    assert len(links.receive(wait_s=60)) == 1
    other.send([Add(order("a").request)])
    assert links.receive(wait_s=60) == []
    (rejected,) = other.receive(wait_s=60)
    assert "still being answered" in rejected.reason
    links.send([Tokens("cmpl-a-0", (3,))])
    assert one.receive(wait_s=60) == [Tokens("cmpl-a-0", (3,))]


def test_a_call_is_aborted_whichever_front_end_took_it() -> None:
    links, one, other = fronts()
    one.send([Add(order(name, index).request) for name, index in (("a", 0), ("a", 1), ("b", 0))])
    assert len(links.receive(wait_s=60)) == 3
    other.send([AbortCall(7, "a")])
    assert links.receive(wait_s=60) == [Abort("cmpl-a-0"), Abort("cmpl-a-1")]
    assert other.receive(wait_s=60) == [Aborted(7, 2)]
    other.send([AbortCall(8, None)])
    assert len(links.receive(wait_s=60)) == 3 and other.receive(wait_s=60) == [Aborted(8, 3)]


def test_it_is_over_once_all_have_said_so_and_what_one_leaves_is_aborted() -> None:
    links, one, other = fronts()
    one.send([Add(order("a").request)])
    assert len(links.receive(wait_s=60)) == 1
    one.send([Over()])
    assert links.receive(wait_s=60) == [Abort("cmpl-a-0")]
    one._socket.close()
    assert links.receive() == []
    other.send([Over()])
    assert links.receive(wait_s=60) == [Over()]
