"""The front end without an engine: what it takes, what it refuses, and how its streams end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any, cast

import pytest

from common.config import DecodeConfig, ServeConfig
from common.decoding import GenerationRequest
from common.errors import ConfigError
from common.serving.engine import front
from common.serving.http.engines.client import EngineClient, QueueFull
from common.serving.http.errors import ApiError
from common.serving.http.orders import Order
from common.serving.http.responses.sse import DONE, event, event_stream
from common.serving.link import Link
from common.serving.messages import Abort, Aborted, Accepted, Add, Counts, Ended, Failed, Ready, Rejected, Tokens

READY = Ready(DecodeConfig(), num_slots=2, max_model_len=64, vocab_size=10)


def order(name: str, index: int = 0, route: str = "cmpl") -> Order:
    return Order(index, 0, GenerationRequest(f"{route}-{name}-{index}", (1, 2)), DecodeConfig())


def with_engine(talk: Any, max_queued: int = 1, num_front_ends: int = 1) -> None:
    """Run `talk(client, engine)`, where engine is the other end of a client that is ready."""

    async def run() -> None:
        here, there = socket.socketpair()
        client, engine = EngineClient(max_queued, lambda *_: None, num_front_ends=num_front_ends), Link(there)
        reading = asyncio.ensure_future(client.follow(*await asyncio.open_connection(sock=here)))
        engine.send([READY])
        while client.ready is None:
            await asyncio.sleep(0)
        client.is_loaded = True
        await talk(client, engine)
        there.close()
        await reading

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_request_is_told_of_up_to_its_end() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        (answer,) = client.submit([order("a")])
        engine.send([Accepted("cmpl-a-0"), Tokens("cmpl-a-0", (3,)), Ended("cmpl-a-0", (4,), "eos", 2)])
        await answer.accepted()
        assert [part.token_ids async for part in answer.parts()] == [(3,), (4,)]
        assert client.num_open == 0
        (added,) = engine.receive(wait_s=60)
        assert isinstance(added, Add) and added.request.id == "cmpl-a-0"

    with_engine(talk)


def test_more_than_slots_and_queue_hold_is_told_to_come_again() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        client.submit([order("a"), order("b"), order("c")])
        with pytest.raises(QueueFull, match="queue is full") as refused:
            client.submit([order("d")])
        assert refused.value.status == 503 and "Retry-After" in refused.value.headers

    with_engine(talk)


def test_what_a_drain_cuts_is_told_to_come_again() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        waiting, begun = client.submit([order("a"), order("b")])
        engine.send([Accepted("cmpl-b-0"), Tokens("cmpl-b-0", (4,))])
        assert await anext(begun.parts())
        client.fail_all("shut down", 503)
        for told in (waiting.accepted(), anext(begun.parts())):
            with pytest.raises(ApiError, match="shut down") as refused:
                await told
            assert refused.value.status == 503 and "Retry-After" in refused.value.headers

    with_engine(talk)


@pytest.mark.parametrize(
    ("name", "route"), [("a", "cmpl"), ("a", "gen"), ("a", "chatcmpl"), ("cmpl-a", "gen"), ("b", "cmpl")]
)
def test_a_name_is_one_open_calls(name: str, route: str) -> None:
    """It is on any route, also while only a part of its answers is open; then it can be used again."""

    async def talk(client: EngineClient, engine: Link) -> None:
        calls = [client.submit([order("a", 0), order("a", 1)]), client.submit([order("gen-b")])]
        engine.send([Accepted("cmpl-a-0"), Ended("cmpl-a-0", (4,), "eos", 1)])
        _ = [part async for part in calls[0][0].parts()]
        wanted = [order(name, route=route)]
        if name == "b":
            assert client.submit(wanted)
            return
        with pytest.raises(ApiError, match="id of its own") as refused:
            client.submit(wanted)
        assert (refused.value.status, refused.value.param) == (400, "request_id")
        engine.send([Accepted("cmpl-a-1"), Ended("cmpl-a-1", (4,), "eos", 1)])
        _ = [part async for part in calls[0][1].parts()]
        assert client.submit(wanted)

    with_engine(talk, max_queued=5)


def test_an_abort_by_the_only_front_end_does_not_wait_for_the_engine() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        client.submit([order("a"), order("a", 1), order("b")])
        assert [await client.abort_call(name) for name in ("a", "c", None)] == [2, 0, 3]
        aborted = [message.id for message in engine.receive(wait_s=60) if isinstance(message, Abort)]
        assert aborted[:2] == ["cmpl-a-0", "cmpl-a-1"]

    with_engine(talk, max_queued=8)


def test_an_abort_beside_other_front_ends_is_answered_with_what_the_engine_counts() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        asking = [asyncio.ensure_future(client.abort_call(name)) for name in ("a", None)]
        await asyncio.sleep(0)
        asked = engine.receive(wait_s=60)
        assert [message.call_id for message in asked] == ["a", None]
        engine.send([Aborted(message.number, count) for message, count in zip(asked, (2, 5), strict=True)])
        assert await asyncio.gather(*asking) == [2, 5]

    with_engine(talk, max_queued=8, num_front_ends=2)


@pytest.mark.parametrize(
    ("message", "status"), [(Rejected("cmpl-a-0", "too long"), 400), (Failed("rank 1 is gone"), 500)]
)
def test_what_the_engine_refuses_and_where_it_fails(message: Any, status: int) -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        (answer,) = client.submit([order("a")])
        engine.send([message])
        with pytest.raises(ApiError, match=r"too long|rank 1") as refused:
            await answer.accepted()
        assert refused.value.status == status and client.num_open == 0
        assert client.state == ("dead" if isinstance(message, Failed) else "ready")

    with_engine(talk)


def test_an_engine_that_is_gone_ends_every_request() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        (answer,) = client.submit([order("a")])
        engine._socket.close()
        with pytest.raises(ApiError, match="has ended"):
            await answer.accepted()
        with pytest.raises(ApiError) as refused:
            client.require_ready()
        assert refused.value.status == 503

    with_engine(talk)


def test_an_engine_that_says_nothing_is_not_healthy_until_it_speaks() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        client.require_alive()
        client._most_silent_s = 0.05
        await asyncio.sleep(0.1)
        for require in (client.require_alive, client.require_ready):
            with pytest.raises(
                ApiError, match=r"has said nothing for .* s, more than serve.engine_silence_s"
            ) as refused:
                require()
            assert refused.value.status == 503
        (replica,) = client.replicas
        replica.state = "loading"
        client.require_alive()
        replica.state = "ready"
        client._most_silent_s = 30.0
        heard_before = replica._heard_at
        engine.send([Counts()])
        while replica._heard_at == heard_before:
            await asyncio.sleep(0.01)
        client.require_ready()

    with_engine(talk)


def test_acceptance_can_be_waited_for_more_than_once() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        (answer,) = client.submit([order("a")])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(answer.accepted(), 0.01)
        engine.send([Accepted("cmpl-a-0"), Ended("cmpl-a-0", (4,), "eos", 1)])
        await answer.accepted()
        await answer.accepted()
        assert [part.token_ids async for part in answer.parts()] == [(4,)]
        (late,) = client.submit([order("b")])
        engine.send([Rejected("cmpl-b-0", "too long")])
        with pytest.raises(ApiError, match="too long"):
            _ = [part async for part in late.parts()]

    with_engine(talk)


def test_silence_is_broken_and_an_error_ends_a_stream_without_done() -> None:
    async def read() -> str:
        is_broken = asyncio.Event()

        async def events() -> AsyncIterator[str]:
            yield event({"a": 1})
            await is_broken.wait()
            raise ApiError(500, "lost")
            yield DONE

        found: list[bytes] = []
        async for part in event_stream(events(), keep_alive_s=0.01).body_iterator:
            found.append(cast("bytes", part))
            if found[-1].startswith(b":"):
                is_broken.set()
        return b"".join(found).decode()

    text = asyncio.run(asyncio.wait_for(read(), 60))
    first, *silence, last, nothing = text.split("\n\n")
    assert first == 'data: {"a": 1}' and set(silence) == {": keep-alive"} and nothing == ""
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "lost"


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "find_spec", lambda name: None if name == "fastapi" else find_spec(name))
    with pytest.raises(ConfigError, match=r"needs fastapi: pip install -e '.\[server\]'"):
        front.check_serving(ServeConfig())
