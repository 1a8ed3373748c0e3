"""Ask an ASGI application in this process, without a server."""

from __future__ import annotations

import asyncio
from typing import Any


def asked(app: Any, method: str, path: str, *parts: bytes, ends: bool = True, **headers: str) -> tuple[int, bytes]:
    """Return status and body of the answer. parts: of the request's body. ends: whether the last one comes."""
    left, sent = list(parts), list[Any]()

    async def receive() -> Any:
        if not left and not ends:
            await asyncio.Event().wait()
        part = left.pop(0) if left else b""
        return {"type": "http.request", "body": part, "more_body": bool(left) or not ends}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "query_string": b"", "http_version": "1.1",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]
