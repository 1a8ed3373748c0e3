"""Bodies of requests: read within bounds of time, bytes and counts, then parsed and checked without stopping the loop.

While one call of the JSON parser or of pydantic lasts, no other thread of this process runs. So what a body may hold
is bounded before it is parsed, and lists are left at their first wrong item (`common.requests.FIRST_ERROR`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Receive

from common.errors import first_line
from common.requests import read_json
from common.serving.http.errors import ApiError
from common.serving.http.explain import checked

# Counted in the bytes, where those of texts count too: so many commas no text has that fits a model.
_MOST_SIGNS = {b",": 2**18, b"[": 2**17, b"{": 2**17, b":": 2**17}
_SMALL_BYTES = 2**14  # parsed faster than a thread is asked to, and taken however much memory others hold
_MOST_HELD_BYTES = 2**26  # of all bodies that are not parsed yet
_MOST_DISCARDED_BYTES, _DISCARD_S = 2**24, 1.0  # of a refused body: clients read once they have sent everything
_PART_S, _BYTES_A_SECOND, _WHOLE_S = 10.0, 2**14, 300.0  # up to the next part; on average after that; of all parts


class Bodies:
    """What all requests share: the memory of their bodies, and the thread that parses long ones."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_held = 0
        self._thread = ThreadPoolExecutor(1, "bodies")

    def hold(self, num_more: int, num_own: int) -> None:
        """Count bytes that have come, of a body that has so many by now. Raises ApiError where there are too many."""
        if num_own > self.max_bytes:
            raise _too_large(self.max_bytes)
        if num_own > _SMALL_BYTES and self._num_held + num_more > _MOST_HELD_BYTES:
            raise ApiError(503, "bodies of other requests take all the room there is: send it again later")
        self._num_held += num_more

    def let_go(self, num_bytes: int) -> None:
        self._num_held -= num_bytes

    async def parsed(self, data: bytearray, kind: type[BaseModel]) -> BaseModel:
        """Parse and check a body. Raises ApiError."""
        if len(data) <= _SMALL_BYTES:
            return _parsed(data, kind)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _parsed, data, kind)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes} bytes: send less")


def checked_route(bodies: Bodies) -> type[APIRoute]:
    """The class of routes whose bodies are read, parsed and checked here; FastAPI gets the checked fields."""

    class CheckedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            if self.body_field is None:
                return handler
            kind: Any = self.body_field.field_info.annotation

            async def checked(request: Request) -> Response:
                own = _CheckedRequest(request, bodies, kind)
                try:
                    return await handler(own)
                finally:
                    own.let_go()

            return checked

    return CheckedRoute


class _CheckedRequest(Request):
    def __init__(self, request: Request, bodies: Bodies, kind: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._bodies, self._kind = bodies, kind
        self._data = bytearray()
        self._num_held = 0

    async def body(self) -> bytes:
        """Read the body, and return its first byte: FastAPI keeps what it gets as long as the answer takes. Raises
        ApiError."""
        try:
            await self._read()
        except ApiError as error:
            self._data = bytearray()
            if error.status == 413 and "expect" not in self.headers:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_discard(self.receive), _DISCARD_S)
            raise
        return bytes(self._data[:1])

    async def json(self) -> Any:
        """The checked fields. Raises ApiError."""
        data, self._data = self._data, bytearray()
        try:
            return await self._bodies.parsed(data, self._kind)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Stop counting the body."""
        self._bodies.let_go(self._num_held)
        self._num_held = 0

    async def _read(self) -> None:
        if int(self.headers.get("content-length", "0")) > self._bodies.max_bytes:
            raise _too_large(self._bodies.max_bytes)
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(415, f"Content-Encoding {encoding:.40} is not undone here: send the body as it is")
        left, began_at = dict(_MOST_SIGNS), time.monotonic()
        while True:
            message = await _received(self.receive, began_at, len(self._data))
            part = message.get("body", b"")
            self._bodies.hold(len(part), len(self._data) + len(part))
            self._num_held += len(part)
            self._data += part
            for sign in left:
                left[sign] -= part.count(sign)
                if left[sign] < 0:
                    most, name = _MOST_SIGNS[sign], sign.decode()
                    raise ApiError(413, f"the body has more than {most} times {name!r}: send it in several calls")
            if not message.get("more_body", False):
                return


async def _discard(receive: Receive) -> None:
    """Read the rest of a body, within bounds, and keep nothing."""
    num_bytes, is_more = 0, True
    while is_more and num_bytes < _MOST_DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        is_more = message.get("more_body", False)


async def _received(receive: Receive, began_at: float, num_bytes: int) -> Mapping[str, Any]:
    """The next part of a body of which so many bytes have come since then. Raises ApiError where it is too slow."""
    wait_s = min(_WHOLE_S, _PART_S + num_bytes / _BYTES_A_SECOND) - (time.monotonic() - began_at)
    try:
        message = await asyncio.wait_for(receive(), min(_PART_S, wait_s))
    except asyncio.TimeoutError:
        raise ApiError(408, f"after {num_bytes} bytes the body came too slowly: send it faster, or less") from None
    if message["type"] == "http.disconnect":
        raise ApiError(499, "the client closed the connection")
    return message


def _parsed(data: bytearray, kind: type[BaseModel]) -> BaseModel:
    try:
        given = read_json(data)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply: send a flatter one") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ApiError(400, "the body holds a number of more than 4,300 digits: write a shorter one") from None
        raise ApiError(400, f"the body is not valid JSON ({first_line(error)}); correct it") from None
    fields: BaseModel = checked(given, kind)
    return fields
