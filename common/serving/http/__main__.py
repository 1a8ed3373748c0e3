"""A front end's process: `python -m common.serving.http LISTENING_FD LINK_FD [REPLICAS_FD]`.

The link leads to the process that starts it: the engine's, or that of several replicas, which come to the socket
REPLICAS_FD by themselves. It ends when that process does, and otherwise when it was told to (SIGTERM) and every client
has its answer. Signals of the terminal do not reach it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from contextlib import nullcontext, suppress
from importlib import import_module

import uvicorn

from common.errors import ConfigError
from common.processes import log_to_stderr, say
from common.serving.events import shown_settings
from common.serving.http.app import build_app
from common.serving.http.connections import KEEP_ALIVE_S, connection_class, make_room, tell_of_loop, tell_seldom
from common.serving.http.engines.client import EngineClient
from common.serving.http.gate import hosts_of
from common.serving.http.rollouts import add_rollouts
from common.serving.http.service import Service
from common.serving.link import framed, read_batch
from common.serving.messages import Begin, Hello, Ready
from common.serving.page import live_page
from common.tables import counted

logger = logging.getLogger("common.serving.http")
_LINGER_S = 2.0  # after a failure, so that probes and clients hear of it
_POLL_S = 0.05
_BACKLOG = 2048
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),
]


class _Server(uvicorn.Server):
    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        """Leave signals to this module."""
        return nullcontext()


class FrontEnd:
    """A server over one engine or several.

    meeting: where replicas come to; None: the engine is at the other end of the link.
    """

    def __init__(
        self,
        begin: Begin,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        listening: socket.socket,
        meeting: socket.socket | None,
    ) -> None:
        self._reader, self._starter, self._meeting = reader, writer, meeting
        self._serve, self._url = begin.run.serve, _url(begin)
        self._ended = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._engine = EngineClient(
            self._serve.max_queued_requests, self._hear_ready, self._serve.engine_silence_s, begin.num_replicas,
            self._serve.num_front_ends,
        )  # fmt: skip
        is_open = not begin.keys
        served = (begin.model_names[0], shown_settings(begin.run.decode)) if is_open else (None, {})
        self._service = Service(begin.run, begin.model_names, self._engine, live_page(*served))
        self._room = make_room(self._serve.max_connections)
        hosts = hosts_of(listening.getsockname()[0], self._serve.host, self._serve.allowed_hosts, begin.keys)
        app = build_app(self._service, begin.keys, hosts)
        add_rollouts(app, self._service)
        config = uvicorn.Config(
            app,
            http=connection_class(self._room),
            ws="none",
            backlog=self._room.num_accepted_at_once,
            headers=_HEADERS,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=5,
        )
        self._listening = listening
        self._server = _Server(config)

    async def run(self) -> None:
        """Run until the engine is gone or the drain is over."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._start_drain)
        loop.set_exception_handler(tell_of_loop)
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listening]))
        watching = asyncio.ensure_future(self._watch())
        talking = asyncio.ensure_future(self._talk())
        importing = asyncio.ensure_future(asyncio.to_thread(import_module, "common.checkpoint"))
        await asyncio.wait({serving, asyncio.ensure_future(self._ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if self._draining is None and not serving.done():
            await asyncio.sleep(_LINGER_S)
        self._server.should_exit = True
        await serving
        await asyncio.to_thread(self._service.close)
        for task in (talking, importing, watching):
            task.cancel()

    async def _talk(self) -> None:
        """Speak with the engines until the process that started this one is gone."""
        try:
            if self._meeting is None:
                await self._engine.follow(self._reader, self._starter)
            else:
                await asyncio.start_unix_server(self._meet, sock=self._meeting)
                (failed,) = await read_batch(self._reader)
                self._engine.lose_all(failed.sentence)
        except (asyncio.IncompleteReadError, OSError):
            self._engine.lose_all("the server has ended")
        finally:
            self._ended.set()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak with a replica that has just started."""
        with suppress(asyncio.CancelledError):  # at the end; Python 3.11 would log it with a traceback
            (hello,) = await read_batch(reader)
            assert isinstance(hello, Hello), "it comes first"
            await self._engine.follow(reader, writer, hello.replica)

    async def _watch(self) -> None:
        """Look after the connections, while more of them wait in the kernel than are accepted at once."""
        while not self._server.started:
            await asyncio.sleep(_POLL_S)
        self._listening.listen(_BACKLOG)
        await self._room.watch()

    def _hear_ready(self, replica: int, ready: Ready) -> None:
        if self._loading is None:
            self._load(ready)
        if self._meeting is not None:
            self._starter.write(framed([Hello(replica)]))

    def _load(self, ready: Ready) -> None:
        """Take requests, once the tokenizer is there too."""

        async def load() -> None:
            try:
                await asyncio.to_thread(self._service.load, ready)
                gc.freeze()  # what torch has brought is looked through no more, which took tenths of a second
            except Exception as error:
                logger.error("the tokenizer cannot be loaded: %s", error)
                self._ended.set()
                return
            self._engine.is_loaded = True
            if self._engine.state == "ready":
                at_once = counted(ready.num_slots, "request")
                logger.info("ready on %s: %s at once, %d positions each", self._url, at_once, ready.max_model_len)

        self._loading = asyncio.ensure_future(load())

    def _start_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Take nothing more, let what is there end, then tell the engine."""
        loop = asyncio.get_running_loop()
        num_open, seconds = self._engine.num_open, self._serve.drain_timeout_s
        if num_open:
            logger.info("shutting down: %s may take up to %g s more", counted(num_open, "request"), seconds)
        self._engine.drain()
        deadline = loop.time() + seconds
        while loop.time() < deadline and self._engine.num_open:
            await asyncio.sleep(_POLL_S)
        if self._engine.num_open:
            logger.warning("cutting %s short", counted(self._engine.num_open, "request"))
            self._engine.fail_all("the server was shut down before the answer was complete", 503)
        self._server.should_exit = True  # which lets what is being written be written
        self._engine.end()


async def _main(listening: socket.socket, link: socket.socket, meeting: socket.socket | None = None) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    try:
        (begin,) = await read_batch(reader)
    except (asyncio.IncompleteReadError, OSError):
        raise SystemExit(1) from None  # the engine's process has said why it ended
    assert isinstance(begin, Begin), "it comes first"
    logger.info("listening on %s; loading the model, and answering 503 meanwhile", _url(begin))
    await FrontEnd(begin, reader, writer, listening, meeting).run()


def _url(begin: Begin) -> str:
    host = begin.run.serve.host
    return f"http://{f'[{host}]' if ':' in host else host}:{begin.port}"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(time=True)
    logging.getLogger("common").setLevel(logging.INFO)
    tell_seldom()
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:])))
    except ConfigError as error:
        say(str(error))
        sys.exit(2)


main()
