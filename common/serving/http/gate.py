"""In front of the routes: who may come in, how long a body may be, and what became of each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.serving.http.errors import ApiError
from common.serving.keys import is_known

_OPEN_TO_ALL = {"/", "/health", "/ready", "/readyz", "/metrics", "/ping"}


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


class Gate:
    """keys: digests of API keys; without any, all may come in. count: called with route and status."""

    def __init__(
        self, app: ASGIApp, keys: tuple[bytes, ...], max_body_bytes: int, count: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                self._count(getattr(route, "path", "unknown"), message["status"])
            await send(message)

        headers = dict(scope["headers"])
        error = self._refusal(scope, headers)
        if error is not None:
            await error_response(error)(scope, receive, counted)
            return
        await self._app(scope, self._bounded(receive), counted)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        is_guarded = self._keys and scope["path"] not in _OPEN_TO_ALL and scope["method"] != "OPTIONS"
        if is_guarded and not is_known(_text(headers.get(b"authorization")), self._keys):
            return ApiError(401, "no valid API key: send one as Authorization: Bearer KEY")
        length = _text(headers.get(b"content-length")) or "0"
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Of a body whose length no header tells."""
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message: dict[str, Any] = dict(await receive())
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                error = self._too_large()
                raise HTTPException(error.status, str(error))  # FastAPI makes 400 of any other kind
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_body_bytes} bytes: send less")


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")
