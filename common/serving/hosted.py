"""The server for a host that brings HTTP of its own, such as Ray Serve: the routes as an ASGI application over an
engine at the other end of a socket, and what that engine's process runs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import RunConfig
from common.errors import ConfigError
from common.serving.engine.front import check_serving
from common.serving.engine.links import Links
from common.serving.engine.loop import RequestLoop
from common.serving.engine.passes import CountedEngine
from common.serving.events import shown_settings
from common.serving.link import Link
from common.serving.messages import Ready
from common.serving.page import live_page
from common.tables import counted

if TYPE_CHECKING:
    from common.generate import Generator

logger = logging.getLogger(__name__)


def answer_requests(generator: Generator, link: Link) -> None:
    """Decode what the front end at the other end asks for, until it says that it is over. Raises EngineError where the
    engine is gone, LinkClosed where the front end is."""
    engine = CountedEngine(generator.engine)
    generator.engine = engine
    capacity = engine.capacity
    vocab_size = capacity.vocab_size or generator.model_config.vocab_size
    with generator.decoding() as core:
        link.send([Ready(generator.run.decode, capacity.num_slots, capacity.max_model_len, vocab_size)])
        at_once = counted(capacity.num_slots, "request")
        logger.info("ready: %s at once, %d positions each", at_once, capacity.max_model_len)
        RequestLoop(core, engine, Links([link])).run()
    generator.close()


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
        names = run.serve.served_model_names or (Path(run.model).resolve().name,)
        page = live_page(None, {}) if keys else live_page(names[0], shown_settings(run.decode))
        self._service = Service(run, names, self._engine, page)
        self.app: Any = build_app(self._service, keys)

    async def start(self) -> bool:
        """Wait for the engine to be ready; False where it has ended instead. Raises ConfigError for a tokenizer that
        cannot be loaded."""
        self._talking = asyncio.ensure_future(self._talk())
        return await self._loaded

    def require_alive(self) -> None:
        """Raise where the engine is gone or stuck."""
        self._engine.require_alive()

    def end(self) -> None:
        """Tell the engine that nothing more will come."""
        self._is_over = True
        self._engine.end()

    async def _talk(self) -> None:
        try:
            await self._engine.follow(*await asyncio.open_connection(sock=self._own))
        finally:
            self._end()

    def _load(self, replica: int, ready: Ready) -> None:
        async def load() -> None:
            try:
                await asyncio.to_thread(self._service.load, ready)
            except ConfigError as error:
                self._loaded.set_exception(error)
                return
            self._engine.is_loaded = True
            self._loaded.set_result(True)

        self._loading = asyncio.ensure_future(load())

    def _end(self) -> None:
        if not self._loaded.done():
            self._loaded.set_result(False)
        elif not self._is_over:
            self._on_end()
