"""The front end without an engine: what it takes, what it refuses, and how its streams end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import pytest

from common.config import DecodeConfig, ServeConfig
from common.decoding import GenerationRequest
from common.errors import ConfigError
from common.serving.engine import front
from common.serving.http.engine import EngineClient
from common.serving.http.errors import ApiError, explained
from common.serving.http.requests.orders import Order
from common.serving.http.responses.sse import DONE, event, event_stream
from common.serving.link import Link
from common.serving.messages import Accepted, Add, Ended, Failed, Ready, Rejected, Tokens

READY = Ready(DecodeConfig(), num_slots=2, max_model_len=64, vocab_size=10)


def order(name: str) -> Order:
    return Order(0, 0, GenerationRequest(name, (1, 2)), 8, DecodeConfig())


def with_engine(talk: Any, max_queued: int = 1) -> None:
    """Run `talk(client, engine)`, where engine is the other end of a client that is ready."""

    async def run() -> None:
        here, there = socket.socketpair()
        client, engine = EngineClient(here, max_queued, lambda _: None, lambda: None), Link(there)
        reading = asyncio.ensure_future(client.run())
        engine.send([READY])
        while client.ready is None:
            await asyncio.sleep(0)
        client.state = "ready"
        await talk(client, engine)
        there.close()
        await reading

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_request_is_told_of_up_to_its_end() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        (answer,) = client.submit([order("a")])
        engine.send([Accepted("a"), Tokens("a", (3,)), Ended("a", (4,), "eos", 2)])
        await answer.accepted()
        assert [part.token_ids async for part in answer.parts()] == [(3,), (4,)]
        assert client.num_open == 0
        (added,) = engine.receive(wait_s=1)
        assert isinstance(added, Add) and added.request.id == "a"

    with_engine(talk)


def test_more_than_slots_and_queue_hold_is_told_to_come_again() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        client.submit([order("a"), order("b"), order("c")])
        with pytest.raises(ApiError, match="queue is full") as refused:
            client.submit([order("d")])
        assert refused.value.status == 503 and "Retry-After" in refused.value.headers and client.num_rejected == 1

    with_engine(talk)


def test_an_id_in_use_is_refused() -> None:
    async def talk(client: EngineClient, engine: Link) -> None:
        client.submit([order("a")])
        with pytest.raises(ApiError) as refused:
            client.submit([order("a")])
        assert refused.value.param == "request_id"

    with_engine(talk)


@pytest.mark.parametrize(("message", "status"), [(Rejected("a", "too long"), 400), (Failed("rank 1 is gone"), 500)])
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


async def _text(events: AsyncIterator[str], keep_alive_s: float) -> str:
    stream = event_stream(events, keep_alive_s)
    return b"".join([part async for part in stream.body_iterator]).decode()  # type: ignore[misc]


def test_silence_is_broken_and_an_error_ends_a_stream_without_done() -> None:
    async def events() -> AsyncIterator[str]:
        yield event({"a": 1})
        await asyncio.sleep(0.05)
        raise ApiError(500, "lost")
        yield DONE

    text = asyncio.run(_text(events(), keep_alive_s=0.01))
    first, *silence, last, nothing = text.split("\n\n")
    assert first == 'data: {"a": 1}' and set(silence) == {": keep-alive"} and nothing == ""
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "lost"


def test_errors_of_fields_name_them() -> None:
    first = {"loc": ("body", "prompt", "str"), "msg": "Input should be a string", "type": "string_type"}
    assert explained([first]).param == "prompt"
    own = {"loc": ("body", "diffusion", "block_size"), "msg": "too small", "type": "x"}
    assert explained([own]).param == "diffusion.block_size"
    whole = {"loc": ("body",), "msg": "Value error, stream_options: only with stream", "type": "value_error"}
    assert explained([whole]).param == "stream_options"


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "find_spec", lambda name: None if name == "fastapi" else find_spec(name))
    with pytest.raises(ConfigError, match=r"needs fastapi: pip install -e '.\[server\]'"):
        front.check_serving(ServeConfig())
