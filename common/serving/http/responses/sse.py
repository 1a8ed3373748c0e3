"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi.responses import StreamingResponse

from common.serving.http.errors import ApiError

DONE = "data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_SILENT = ": keep-alive\n\n"


# Ends of lines to many a client's reader, as to Python's splitlines, though not to the standard.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"}


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)}\n\n"


def event_stream(events: AsyncIterator[str], keep_alive_s: float) -> StreamingResponse:
    """events: of `event`. An ApiError among them becomes the last event, without [DONE]: what was cut short must not
    look complete."""
    return StreamingResponse(_kept_alive(events, keep_alive_s), media_type="text/event-stream", headers=_HEADERS)


async def _kept_alive(events: AsyncIterator[str], keep_alive_s: float) -> AsyncIterator[bytes]:
    waiting: asyncio.Future[str] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({waiting}, timeout=keep_alive_s)
            if not done:
                yield _SILENT.encode()
                continue
            finished, waiting = waiting, None
            try:
                text = finished.result()
            except StopAsyncIteration:
                return
            except ApiError as error:
                yield event(error.body).encode()
                return
            yield text.encode("utf-8", errors="replace")
    finally:
        if waiting is not None:
            waiting.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, ApiError):
                await waiting
        await events.aclose()  # type: ignore[attr-defined]
