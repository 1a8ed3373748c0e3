"""Connections that wait, do not read, are closed by half, or are too many."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import uvicorn

from common.serving.http import connections
from common.serving.http.connections import Room, Seldom, connection_class, make_room, tell_of_loop

_LONG_S = 30.0


class App:
    """`/slow` answers once it is let go, `/endless` writes on and on; `gone` are paths whose clients left early."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.started: list[str] = []
        self.gone: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.started.append(path)
        while (await receive()).get("more_body", False):
            pass
        leaving = asyncio.ensure_future(receive())
        going = asyncio.ensure_future(self.go_on.wait())
        if path == "/slow":
            await asyncio.wait({leaving, going}, return_when=asyncio.FIRST_COMPLETED)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while path == "/endless" and not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"done", "more_body": False})
        if leaving.done():
            self.gone.append(path)
        leaving.cancel()
        going.cancel()


def served(talk: Callable[[int, Room, App], Awaitable[None]], size: int = 100) -> None:
    """Run `talk(port, room, app)` against a server of this many connections."""

    async def run() -> None:
        room, app = Room(size), App()
        config = uvicorn.Config(
            app,
            http=connection_class(room),
            ws="none",
            lifespan="off",
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        watching = asyncio.ensure_future(room.watch())
        await until(lambda: server.started)
        try:
            await talk(listening.getsockname()[1], room, app)
        finally:
            app.go_on.set()
            watching.cancel()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(run(), 2 * _LONG_S))


async def until(condition: Callable[[], Any]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), _LONG_S)


async def connected(port: int, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


def request(path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def whole(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(-1), _LONG_S)
    except ConnectionError:
        return b""


async def head_of(reader: asyncio.StreamReader) -> str:
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _LONG_S)).decode()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: loc"])
def test_a_head_that_does_not_come_is_given_up(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 0.2)
    monkeypatch.setattr(connections, "_LOOK_S", 0.05)

    async def talk(port: int, room: Room, app: App) -> None:
        reader, _writer = await connected(port, sent)
        assert await whole(reader) == b"" and not app.started

    served(talk)


def test_half_a_second_head_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.3)
    monkeypatch.setattr(connections, "_LOOK_S", 0.05)

    async def talk(port: int, room: Room, app: App) -> None:
        reader, writer = await connected(port, request())
        assert "200 OK" in await head_of(reader)
        writer.write(b"GET / HT")
        await whole(reader)
        assert app.started == ["/"]

    served(talk)


@pytest.mark.parametrize(
    "sent", [b"no request\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"], ids=["no request", "two hosts"]
)
def test_what_is_no_http_is_answered_as_any_error(sent: bytes) -> None:
    async def talk(port: int, room: Room, app: App) -> None:
        reader, _ = await connected(port, sent)
        head, _, body = (await whole(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"application/json" in head
        error = json.loads(body)["error"]
        assert error["message"].startswith("Invalid HTTP request received: correct its first line")
        assert error["code"] == 400 and not app.started

    served(talk)


def test_a_new_connection_takes_the_place_of_idle_ones() -> None:
    async def talk(port: int, room: Room, app: App) -> None:
        busy = await connected(port, request("/slow"))
        await until(lambda: app.started == ["/slow"])
        silent = [await connected(port) for _ in range(40)]
        new = await connected(port, request())
        assert "200 OK" in await head_of(new[0])
        app.go_on.set()
        assert "200 OK" in await head_of(busy[0]), "who is being answered stays"
        assert await whole(silent[0][0]) == b"", "the first that came has gone"

    served(talk, size=8)


def test_where_all_are_being_answered_a_new_one_is_told_to_come_again() -> None:
    async def talk(port: int, room: Room, app: App) -> None:
        busy = [await connected(port, request("/slow")) for _ in range(4)]
        await until(lambda: len(app.started) == 4)
        reader, writer = await connected(port, request())
        answer = await whole(reader)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in head and b"Connection: close" in head
        assert "connect again later" in json.loads(body)["error"]["message"]
        writer.close()
        app.go_on.set()
        for reader, _ in busy:
            assert "200 OK" in await head_of(reader)
        reader, _ = await connected(port, request())
        assert "200 OK" in await head_of(reader), "there is room again"

    served(talk, size=4)


@pytest.mark.parametrize("path", ["/", "/slow"])
def test_a_client_that_has_closed_its_own_half_gets_its_answer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nc -N` does that; after a while the server asks whether it is there, which clients skip."""
    monkeypatch.setattr(connections, "_LOOK_S", 0.05)

    async def talk(port: int, room: Room, app: App) -> None:
        reader, writer = await connected(port, request(path))
        writer.write_eof()
        if path == "/slow":
            assert "100 Continue" in await head_of(reader)
            app.go_on.set()
        answer = await whole(reader)
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"done" in answer
        assert app.gone == []

    served(talk)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_has_left_is_noticed(is_reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_LOOK_S", 0.05)

    async def talk(port: int, room: Room, app: App) -> None:
        _, writer = await connected(port, request("/slow"))
        await until(lambda: app.started)
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await until(lambda: app.gone == ["/slow"])

    served(talk)


def test_a_client_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_LOOK_S", 0.05)
    monkeypatch.setattr(connections, "_WRITE_S", 0.3)

    async def talk(port: int, room: Room, app: App) -> None:
        own = socket.create_connection(("127.0.0.1", port))
        own.sendall(request("/endless"))
        await until(lambda: app.gone == ["/endless"])
        own.close()

    served(talk)


def test_what_is_dear_to_read_is_read_in_parts_and_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_DEAR_S", -1.0)
    rests: list[float] = []
    rest_after = Room.rest_after

    def counted(room: Room, seconds: float) -> float:
        rests.append(seconds)
        return rest_after(room, seconds)

    monkeypatch.setattr(Room, "rest_after", counted)

    async def talk(port: int, room: Room, app: App) -> None:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await connected(port, head + b"1\r\na\r\n" * 10_000 + b"0\r\n\r\n")
        assert "200 OK" in await head_of(reader)
        writer.close()
        assert len(rests) >= 60_000 / connections._READ_BYTES

    served(talk)


def test_all_that_is_dear_together_gets_a_part_of_the_processor() -> None:
    room = Room(10)
    first, second = room.rest_after(1.0), room.rest_after(1.0)
    assert second - first == pytest.approx(3.0)


def test_the_number_of_connections_follows_the_number_of_files(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert make_room(600).size == 600, "the soft limit is raised"
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600 + 192
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
        patch.setattr(resource, "setrlimit", lambda *_: None)
        assert make_room(4096).size == 1024 - 192 and "ulimit -n" in caplog.text


def test_a_message_of_a_library_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("common.serving.http.connections")
    seldom = Seldom()
    logger.addFilter(seldom)
    try:
        error = OSError(24, "Too many open files")
        for _ in range(1000):
            tell_of_loop(cast("Any", None), {"exception": error})
            logger.error("Invalid HTTP request received.")
    finally:
        logger.removeFilter(seldom)
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "a connection waits", "Invalid HTTP request received.",
    ]  # fmt: skip
