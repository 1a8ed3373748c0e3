"""What runs before the routes: who may come in, what became of each request, the answer where this server failed."""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.serving.http.errors import ApiError
from common.serving.keys import is_known

logger = logging.getLogger(__name__)
_OPEN_TO_ALL = {"/", "/health", "/ready", "/metrics"}
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s/\\@?#\[\]:]+))(?::\d*)?")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers={**(headers or {}), **error.headers})


def hosts_of(address: str, name: str, more: Sequence[str], keys: Collection[bytes]) -> frozenset[str] | None:
    """Return the names that clients may call this server by; None: any.

    Where no key is needed and only this machine can connect, a browser is the way in for others: a page whose name
    leads to 127.0.0.1 all at once (DNS rebinding) sends its own name. address: that is listened on. name: as the run
    gives it. more: as `serve.allowed_hosts` does.
    """
    if keys or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    return frozenset(one.lower() for one in (*_LOCAL_NAMES, name, *more))


class Gate:
    """keys: digests of API keys; without any, all may come in. hosts: of `hosts_of`. count: called with route and
    status."""

    def __init__(
        self, app: ASGIApp, keys: tuple[bytes, ...], hosts: frozenset[str] | None, count: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._count = count
        self._logged: set[tuple[str, int]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def counted(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                route = scope.get("route")
                self._count(getattr(route, "path", "unknown"), message["status"])
            await send(message)

        headers = dict(scope["headers"])
        error = self._refusal(scope, headers)
        try:
            if error is None:
                await self._app(scope, receive, counted)
        except Exception as defect:
            self._log(defect)
            if has_started:
                return  # uvicorn closes what is not complete
            error = ApiError(500, "the server failed at this request; its log says how")
        if error is not None:
            await error_response(error)(scope, receive, counted)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        for name, is_url in (("host", False), ("origin", True)):
            value = headers.get(name.encode(), b"").decode("latin-1")
            if value and self._hosts is not None and _host_of(value, is_url=is_url) not in self._hosts:
                return ApiError(
                    403,
                    f"{name.capitalize()} {value:.100}: this server answers to local names only, as it wants no API "
                    "key; call it localhost, or list the name in serve.allowed_hosts",
                )
        is_guarded = self._keys and scope["path"] not in _OPEN_TO_ALL and scope["method"] != "OPTIONS"
        if is_guarded and not is_known(headers.get(b"authorization", b"").decode("latin-1"), self._keys):
            return ApiError(401, "no valid API key: send one as Authorization: Bearer KEY")
        return None

    def _log(self, defect: Exception) -> None:
        """Log a defect with its traceback, once for each place: clients must not be able to fill a disk."""
        traceback = defect.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        where = ("", 0) if traceback is None else (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        if where not in self._logged:
            self._logged.add(where)
            logger.error("a request failed, and others that fail there are not told of again", exc_info=defect)


def _host_of(value: str, *, is_url: bool) -> str | None:
    """Return the name in a header, without its port and in lower case; None for what is more than name and port, or no
    name."""
    found = _HOST.fullmatch(value.partition("://")[2] if is_url else value)
    return None if found is None else (found[1] or found[2]).lower()
