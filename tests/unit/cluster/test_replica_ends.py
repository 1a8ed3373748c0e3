"""A replica whose engine does not start, or ends at an odd moment: whoever waits for it is told."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.cluster import processes, replica, serve
from common.cluster.processes import EngineProcesses, Order
from common.cluster.replica import Replica
from common.config import DecodeConfig, load_profile, load_run
from common.decoding import GenerationRequest, Rejection
from common.errors import EngineError
from common.serving import HostedServer, Ready, framed
from common.serving.link import Link
from tests.descriptors import high_descriptor

READY = Ready(DecodeConfig(), 1, 100, 1000)
WAIT_S = 60


class Ended:
    """`EngineProcesses` whose other end of the socket is the test's."""

    def __init__(self, own: socket.socket) -> None:
        self._own = own

    def connect(self) -> socket.socket:
        return self._own

    def why_ended(self) -> str:
        return "killed"

    def close(self) -> None:
        """There is nothing to end."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    own, there = socket.socketpair()
    monkeypatch.setattr(replica, "EngineProcesses", lambda _: Ended(own))
    there.sendall(framed([READY]))
    return there


def started() -> Replica:
    return Replica(load_profile("cpu"), load_run("demo"))


@pytest.mark.parametrize("length", [2, 4, 5000], ids=["in the length", "after it", "in the message"])
def test_an_engine_that_ends_amid_a_message_has_ended(engine: socket.socket, length: int) -> None:
    one = started()
    future = one.submit(GenerationRequest("x", (1, 2)))
    engine.recv(100_000)  # else the socket's end is an error
    engine.sendall(framed([Rejection("0", "r" * 10_000)])[:length])
    engine.close()
    with pytest.raises(EngineError, match="killed"):
        future.result(WAIT_S)
    assert one.failure is not None


def test_who_no_longer_waits_holds_up_nobody(engine: socket.socket) -> None:
    one = started()
    first, second, third, last = (one.submit(GenerationRequest(name, (1, 2))) for name in "xyzw")
    assert first.cancel() and third.cancel()
    engine.sendall(framed([Rejection("0", "no")]) + framed([Rejection("1", "no")]))
    assert second.result(WAIT_S) == Rejection("y", "no")
    engine.close()
    with pytest.raises(EngineError, match="killed"):
        last.result(WAIT_S)


def test_what_is_no_message_ends_the_replica(engine: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # which prints the reading thread's error
    one = started()
    future = one.submit(GenerationRequest("x", (1, 2)))
    engine.sendall((3).to_bytes(4, "big") + b"???")
    with pytest.raises(EngineError, match="killed"):
        future.result(WAIT_S)


def test_a_process_that_cannot_be_started_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(processes.subprocess, "Popen", fails)
    ours = EngineProcesses(Order(load_profile("cpu"), load_run("demo"), is_server=False))
    said: list[str] = []

    def connect() -> None:
        with pytest.raises(EngineError) as failed:
            ours.connect()
        said.append(str(failed.value))

    waiting = threading.Thread(target=connect, daemon=True)
    waiting.start()
    waiting.join(WAIT_S)
    assert said == ["the engine's process cannot be started: Cannot allocate memory"]
    ours.close()


def test_processes_may_meet_at_any_descriptor() -> None:
    ours = object.__new__(EngineProcesses)
    ours._has_ended = threading.Event()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        with high_descriptor(listening) as own, socket.create_connection(listening.getsockname()):
            ours._listening = own
            ours.connect().close()


def test_an_engine_that_is_slow_to_end_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, codes = threading.Event(), list[int]()
    monkeypatch.setattr(serve, "_LINGER_S", 0)
    monkeypatch.setattr(serve.os, "_exit", codes.append)

    def why_ended() -> str:
        assert may_go_on.wait(WAIT_S)
        return "killed"

    async def leave() -> None:
        actor = object.__new__(serve.ServedReplica)
        actor._processes = cast("Any", SimpleNamespace(why_ended=why_ended))
        actor._leave()
        assert not codes
        may_go_on.set()
        await actor._leaving

    monkeypatch.delattr(serve.ServedReplica, "__del__")
    asyncio.run(leave())
    assert codes == [1]


def started_server(load: Callable[[Ready], None], engine: socket.socket, own: socket.socket) -> HostedServer:
    """A server that is starting, whose engine is ready."""
    server = HostedServer(load_run("demo"), own, lambda: None)
    server._service.load = load  # type: ignore[method-assign]
    Link(engine).send([READY])
    return server


def test_a_hosted_server_tells_whatever_the_tokenizer_raises() -> None:
    def load(_: Ready) -> None:
        raise RuntimeError("a library's own error")

    async def start() -> None:
        own, there = socket.socketpair()
        server = started_server(load, there, own)
        with pytest.raises(RuntimeError, match="a library's own error"):
            await asyncio.wait_for(server.start(), WAIT_S)
        there.close()

    asyncio.run(start())


@pytest.mark.parametrize("problem", [None, RuntimeError("too late")], ids=str)
def test_an_engine_that_ends_while_the_tokenizer_loads_has_ended(problem: Exception | None) -> None:
    is_loading, may_go_on = threading.Event(), threading.Event()

    def load(_: Ready) -> None:
        is_loading.set()
        assert may_go_on.wait(WAIT_S)
        if problem is not None:
            raise problem

    async def start() -> bool:
        own, there = socket.socketpair()
        server = started_server(load, there, own)
        starting = asyncio.ensure_future(server.start())
        assert await asyncio.to_thread(is_loading.wait, WAIT_S)
        there.close()
        found = await asyncio.wait_for(starting, WAIT_S)
        may_go_on.set()
        await server._loading
        return found

    assert asyncio.run(start()) is False
