"""Connections: how many there may be, and how long a client may take for a head, between requests and to read.

uvicorn has no time limit in front of a request's head and none for a client that does not read, and asyncio tells of
each connection that it has no descriptor for. How long a body may take is said in `bodies`.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import json
import logging
import math
import resource
import socket
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.serving.http.errors import ApiError

logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 60.0  # between two requests
_HEAD_S = 10.0  # up to the end of the first head
_WRITE_S = 30.0  # in which a client has to read a part of what was written
_LINGER_S = 2.0  # in which a client that was turned away reads why
_LOOK_S = 0.5
_MOST_TURNED_AWAY = 64  # that linger at once
_OTHER_FILES = 192  # descriptors that are no connections, or of those that come and go
_FEWEST = 8
_READ_BYTES = 2**13  # of one connection, before others have their turn
_DEAR_S = 0.002  # of the processor, for what was read at once: a thousand headers, or chunks of a byte
_RESTS = 3  # times as long as it took
_SELDOM_S = 60.0
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_TOO_MANY = "there are as many connections as this server takes: connect again later"


class Room:
    """The open connections, of which there are at most `size`: new ones take the place of those that wait for nothing
    but their client, and are turned away where all are being answered."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._open: set[Connection] = set()
        self._num_turned_away = 0
        self._rested_at = 0.0

    def enter(self, connection: Connection) -> bool:
        """Whether there is room for it, after some of the idle ones have gone."""
        if len(self._open) >= self.size:
            idle = (one for one in self._open if not one.is_answering)
            for one in heapq.nsmallest(1 + self.size // 16, idle, key=lambda one: one.until):
                self.leave(one)
                one.transport.abort()
        is_admitted = len(self._open) < self.size or self._num_turned_away < _MOST_TURNED_AWAY
        if is_admitted:
            connection.is_turned_away = len(self._open) - self._num_turned_away >= self.size
            self._num_turned_away += connection.is_turned_away
            self._open.add(connection)
        return is_admitted and not connection.is_turned_away

    def leave(self, connection: Connection) -> None:
        if connection in self._open:
            self._open.discard(connection)
            self._num_turned_away -= connection.is_turned_away

    def rest_after(self, seconds: float) -> float:
        """Return when a connection is to be read again that has just taken so much of the processor: all such
        connections together get a part of it."""
        self._rested_at = max(self._rested_at, time.monotonic()) + _RESTS * seconds
        return self._rested_at

    @property
    def num_accepted_at_once(self) -> int:
        """New connections that are accepted before others have their turn and idle ones are closed."""
        return max(8, min(64, self.size // 8))

    async def watch(self) -> None:
        """End what takes too long, until this is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for connection in [*self._open]:
                connection.look(now)


def connection_class(room: Room) -> type[asyncio.Protocol]:
    """The protocol of a server whose connections are in this room."""

    class OwnConnection(Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.room = room

    return OwnConnection


class Connection(H11Protocol):
    """until: when it is to be ended, by the monotonic clock."""

    room: Room
    until = math.inf
    is_turned_away = False
    _is_half_closed = False
    _was_asked = False

    @property
    def is_answering(self) -> bool:
        """Whether the head of a request has come whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def look(self, now: float) -> None:
        """End the connection where its time is over or its client is gone; called a few times a second."""
        if now > self.until:
            self.transport.abort()
        elif self.transport.is_closing():  # and something is not read yet
            self.until = min(self.until, now + _WRITE_S)
        elif self._is_half_closed and not self._was_asked:
            self._ask()
        elif self._is_half_closed and self.transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_ERROR
        ):
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # asyncio's, of which one read can take a second
        if self.room.enter(self):
            self.until = time.monotonic() + _HEAD_S
            return
        transport.write(_closing(ApiError(503, _TOO_MANY)))
        if self.is_turned_away:  # else its request, which nobody reads, would take the answer with it
            transport.write_eof()
            self.until = time.monotonic() + _LINGER_S
        else:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_turned_away:
            return
        began = time.thread_time()
        super().data_received(data)
        took = time.thread_time() - began
        if took > _DEAR_S:
            self.transport.pause_reading()
            self.loop.call_at(self.room.rest_after(took), self._go_on)
        if self.is_answering and not self.flow.write_paused:
            self.until = math.inf

    def _go_on(self) -> None:
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep it: a client that has closed its own half may wait for its answer.

        One that is gone looks alike, until something is written to it.
        """
        self._is_half_closed = self.is_answering and not self.cycle.more_body
        if self._is_half_closed and self.cycle.response_started:
            self._ask()
        return self._is_half_closed

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_answering:
            self.until = time.monotonic() + KEEP_ALIVE_S
            if self._is_half_closed:
                self.transport.close()

    def pause_writing(self) -> None:
        self.until = time.monotonic() + _WRITE_S
        super().pause_writing()

    def resume_writing(self) -> None:
        self.until = math.inf if self.is_answering else time.monotonic() + KEEP_ALIVE_S
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as every other error is answered."""
        error = ApiError(400, f"{msg.rstrip('.')}: correct its first line, its headers or the lengths of its body")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer has begun
            self.transport.write(_closing(error))
        self.transport.close()

    def _ask(self) -> None:
        """Send bytes that a client skips, since the socket learns from them whether the client is gone."""
        self._was_asked = True
        if self.conn.our_state is h11.SEND_BODY:
            with suppress(h11.LocalProtocolError):  # not of a stream, whose parts are whole events
                self.transport.write(self.conn.send(h11.Data(data=b": \n\n")))
        elif self.scope["http_version"] != "1.0":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _closing(error: ApiError) -> bytes:
    """Return an answer after which the connection is closed."""
    body = json.dumps(error.body).encode()
    headers = {
        **error.headers, "Content-Type": "application/json", "Content-Length": len(body), "Connection": "close",
    }  # fmt: skip
    status = HTTPStatus(error.status)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def make_room(wanted: int) -> Room:
    """Make room for so many connections, or as many as this process may have descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Room(wanted)
    size = max(_FEWEST, soft - _OTHER_FILES)
    logger.warning("%d connections at most, not %d: this process may open %d files (ulimit -n)", size, wanted, soft)
    return Room(size)


class Seldom(logging.Filter):
    """Lets each message of a library through once a minute: clients must not be able to fill a disk."""

    def __init__(self) -> None:
        super().__init__()
        self._told_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        message, now = str(record.msg)[:80], time.monotonic()
        is_due = now - self._told_at.get(message, -math.inf) > _SELDOM_S
        if is_due and (message in self._told_at or len(self._told_at) < 1000):
            self._told_at[message] = now
        return is_due


def tell_seldom() -> None:
    """Let each message of asyncio and uvicorn through once a minute."""
    seldom = Seldom()
    for name in ("asyncio", "uvicorn.error", __name__):
        logging.getLogger(name).addFilter(seldom)


def tell_of_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what an event loop could not handle."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR:
        logger.error("a connection waits, since no file can be opened (%s): raise ulimit -n", error.strerror)
    else:
        loop.default_exception_handler(context)
