"""The server for a host that brings HTTP of its own, such as Ray Serve: the routes as an ASGI application over an
engine at the other end of a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from common.config import RunConfig
from common.serving.engine.front import check_serving
from common.serving.events import shown_settings
from common.serving.messages import Ready
from common.serving.page import live_page
from common.serving.served import model_names


class HostedServer:
    """The routes of `lopa serve`. app: the ASGI application, of the loop that `start` was called in.

    own: the socket to a process that runs `answer_requests`. on_end: called once where that process ends before `end`.
    Raises ConfigError where API keys cannot be read.
    """

    def __init__(self, run: RunConfig, own: socket.socket, on_end: Callable[[], None]) -> None:
        keys = check_serving(run.serve)
        # Here: the engine's process imports this module too.
        from common.serving.http.app import build_app
        from common.serving.http.engines.client import EngineClient
        from common.serving.http.service import Service

        self._on_end = on_end
        self._is_over = False
        self._loaded: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._own = own
        self._engine = EngineClient(run.serve.max_queued_requests, self._load, run.serve.engine_silence_s)
        names = model_names(run)
        page = live_page(None, {}) if keys else live_page(names[0], shown_settings(run.decode))
        self._service = Service(run, names, self._engine, page)
        self.app: Any = build_app(self._service, keys)

    async def start(self) -> bool:
        """Wait for the engine to be ready; False where it has ended instead. Raises what loading the tokenizer
        raises."""
        self._talking = asyncio.ensure_future(self._talk())
        return await self._loaded

    def require_alive(self) -> None:
        """Raise where the engine is gone or stuck."""
        self._engine.require_alive()

    def end(self) -> None:
        """Tell the engine that nothing more will come."""
        self._is_over = True
        self._engine.end()
        self._service.close()

    async def _talk(self) -> None:
        try:
            await self._engine.follow(*await asyncio.open_connection(sock=self._own))
        finally:
            self._end()

    def _load(self, replica: int, ready: Ready) -> None:
        async def load() -> None:
            try:
                await asyncio.to_thread(self._service.load, ready)
            except Exception as error:
                if not self._loaded.done():
                    self._loaded.set_exception(error)
                return
            self._engine.is_loaded = True
            if not self._loaded.done():  # else the engine has ended meanwhile
                self._loaded.set_result(True)

        self._loading = asyncio.ensure_future(load())

    def _end(self) -> None:
        if not self._loaded.done():
            self._loaded.set_result(False)
        elif not self._is_over:
            self._on_end()
