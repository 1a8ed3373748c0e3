"""A replica that decodes requests of a batch: as many as are given, each as soon as there is room."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO

from common.cluster.processes import EngineProcesses, Order
from common.config import DeviceProfile, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import EngineError
from common.serving import LENGTH_BYTES, Ready, framed

logger = logging.getLogger(__name__)
Result = Completion | Rejection
_MOST_ATTEMPTS = 3  # of a request whose engine ends: it may be what ends it


class Replica:
    """One engine from its start to its end. Raises EngineError where the engine does not start."""

    def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:
        self._processes = EngineProcesses(Order(profile, run, is_server=False))
        self._socket = self._processes.connect()
        self._incoming = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[str, tuple[str, Future[Result]]] = {}
        self.failure: EngineError | None = None
        first = _messages(self._incoming)
        if not first:
            raise EngineError(self._processes.why_ended())
        self.ready: Ready = first[0]
        threading.Thread(target=self._read, daemon=True).start()

    def submit(self, request: GenerationRequest) -> Future[Result]:
        """Give a request to the engine. The future raises EngineError where the engine ends before it has answered.

        Requests of one id are answered alike: over the socket each has a number.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self.failure is not None:
                future.set_exception(self.failure)
                return future
            number = str(next(self._numbers))
            self._open[number] = request.id, future
            noise_name = request.id if request.noise_name is None else request.noise_name
            try:
                self._socket.sendall(framed([replace(request, id=number, noise_name=noise_name)]))
            except OSError:  # which the reading thread finds too, and tells
                logger.debug("the engine's socket is closed")
        return future

    def close(self) -> None:
        """End the engine."""
        with suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._processes.close()

    def _read(self) -> None:
        try:
            while messages := _messages(self._incoming):
                for message in messages:
                    with self._lock:
                        request_id, future = self._open.pop(message.id)
                    if future.set_running_or_notify_cancel():
                        future.set_result(replace(message, id=request_id))
        finally:
            self._fail(EngineError(self._processes.why_ended()))

    def _fail(self, failure: EngineError) -> None:
        with self._lock:
            self.failure, left = failure, [future for _, future in self._open.values()]
            self._open.clear()
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)


class LastingReplica:
    """A replica whose engine is started again where it has ended."""

    def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:
        self._profile, self._run = profile, run
        self._lock = threading.Lock()
        self._replica = Replica(profile, run)

    @property
    def ready(self) -> Ready:
        return self._replica.ready

    async def result(self, request: GenerationRequest) -> Result:
        """Decode a request. Raises EngineError where the engine does not start, or ends each time."""
        for _ in range(_MOST_ATTEMPTS - 1):
            with suppress(EngineError):
                return await asyncio.wrap_future(self._living().submit(request))
        return await asyncio.wrap_future(self._living().submit(request))

    def _living(self) -> Replica:
        with self._lock:
            if self._replica.failure is not None:
                logger.warning("%s; it is started again", self._replica.failure)
                self._replica.close()
                self._replica = Replica(self._profile, self._run)
            return self._replica


def _messages(incoming: BinaryIO) -> list[Any]:
    """Return what comes next over a link; nothing at its end, which may be amid a message."""
    try:
        head = incoming.read(LENGTH_BYTES)
        length = int.from_bytes(head, "big")
        body = incoming.read(length)
    except (OSError, ValueError):  # it was closed here
        return []
    is_whole = len(head) == LENGTH_BYTES and len(body) == length
    messages: list[Any] = pickle.loads(body) if is_whole else []
    return messages
