"""The engine as seen from the front end: requests go there, what becomes of them comes back."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from common.serving.http.errors import ApiError
from common.serving.http.orders import Order
from common.serving.link import LENGTH_BYTES, framed
from common.serving.messages import Abort, Accepted, Add, Counts, Ended, Failed, Over, Passed, Ready, Rejected, Tokens
from common.tables import counted

logger = logging.getLogger(__name__)
_GONE = "the engine has ended; start the server again"
_NOT_READY = {
    "loading": "the model is being loaded; send it again once GET /ready answers 200",
    "draining": "the server is being shut down, and takes no more requests",
}


class Answer:
    """One request that has gone to the engine, and what has come of it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.id = order.request.id
        self.added_at = time.monotonic()
        self.is_over = False
        self._decided = asyncio.Event()
        self._refusal: ApiError | None = None
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, message: Any) -> None:
        self.is_over = self.is_over or isinstance(message, (Ended, Rejected, Failed))
        if not self._decided.is_set():
            self._refusal = None if isinstance(message, Accepted) else _error_of(message)
            self._decided.set()
        if not isinstance(message, Accepted):
            self._messages.put_nowait(message)

    async def accepted(self) -> None:
        """Wait until the engine has taken it. Raises ApiError where it cannot decode it."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    async def parts(self) -> AsyncIterator[Tokens | Passed | Ended]:
        """Yield what comes, the end last. Raises ApiError where the engine refuses or fails."""
        while True:
            message = await self._messages.get()
            if isinstance(message, (Rejected, Failed)):
                raise _error_of(message)
            yield message
            if isinstance(message, Ended):
                return


def _error_of(message: Any) -> ApiError:
    if isinstance(message, Rejected):
        return ApiError(message.status, message.reason)
    return ApiError(500, message.sentence)


class EngineClient:
    """The front end's end of the link.

    state: `loading`, `ready`, `draining` or `dead`. counts: the last that the engine has told. on_ready: called with
    what the engine says of itself. on_end: called when the engine is gone, once. most_silent_s: a loaded engine that
    says nothing for longer counts as stuck. It speaks a few times a second, but not within a pass: a thread beside its
    loop could speak then too, and would go on when the loop hangs.
    """

    def __init__(
        self,
        own: socket.socket,
        max_queued: int,
        on_ready: Callable[[Ready], None],
        on_end: Callable[[], None],
        most_silent_s: float = math.inf,
    ) -> None:
        self.state = "loading"
        self.counts = Counts()
        self.ready: Ready | None = None
        self.num_rejected = 0
        self._socket = own
        self._max_queued = max_queued
        self._on_ready, self._on_end = on_ready, on_end
        self._most_silent_s = most_silent_s
        self._heard_at = time.monotonic()
        self._answers: dict[str, Answer] = {}
        self._writer: asyncio.StreamWriter | None = None

    @property
    def num_open(self) -> int:
        """Requests that the engine has not ended."""
        return len(self._answers)

    async def run(self) -> None:
        """Read from the engine until it is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        try:
            while True:
                head = await reader.readexactly(LENGTH_BYTES)
                body = await reader.readexactly(int.from_bytes(head, "big"))
                self._heard_at = time.monotonic()
                for message in pickle.loads(body):
                    self._take(message)
        except (asyncio.IncompleteReadError, OSError):
            self._fail(_GONE)
        finally:
            self._on_end()

    def submit(self, orders: Sequence[Order], *, is_watched: bool = False) -> list[Answer]:
        """Send orders. Raises ApiError where no more can be taken now, or where a call of that name is open."""
        self.require_ready()
        assert self.ready is not None, "it has told so"
        if len(self._answers) + len(orders) > self.ready.num_slots + self._max_queued:
            self.num_rejected += 1
            raise ApiError(503, f"the queue is full ({self._max_queued} requests wait): send it again later")
        names = {name for order in orders for name in _call_names(order.request.id)}
        if any(name in names for request_id in self._answers for name in _call_names(request_id)):
            raise ApiError(
                400,
                "request_id: a call of this id is still being answered; give each call an id of its own, here or in "
                "the header X-Request-Id",
                "request_id",
            )
        answers = [Answer(order) for order in orders]
        self._answers.update({answer.id: answer for answer in answers})
        self._send([Add(order.request, is_watched) for order in orders])
        return answers

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last word."""
        return time.monotonic() - self._heard_at

    def require_alive(self) -> None:
        """Raise ApiError where the engine is gone, or says nothing for too long. A load may take any time."""
        if self.state == "dead":
            raise ApiError(503, _GONE)
        if self.state != "loading" and self.silent_s > self._most_silent_s:
            raise ApiError(
                503,
                f"the engine has said nothing for {self.silent_s:.0f} s, more than serve.engine_silence_s "
                f"({self._most_silent_s:g} s): it is stuck, or in a very long pass; this ends when it speaks again",
            )

    def require_ready(self) -> None:
        """Raise ApiError saying why no request can be taken."""
        self.require_alive()
        if self.state != "ready":
            raise ApiError(503, _NOT_READY[self.state])

    def abort(self, answers: Sequence[Answer]) -> None:
        """Abort those of these answers that have not ended."""
        ids = [answer.id for answer in answers if not answer.is_over]
        if ids:
            self._send([Abort(request_id) for request_id in ids])

    def abort_call(self, call_id: str | None) -> int:
        """Abort all requests of a call by its answer's id, with its prefix or without; None: of all calls. Return how
        many."""
        found = [answer for answer in self._answers.values() if call_id is None or call_id in _call_names(answer.id)]
        self.abort(found)
        return len(found)

    def drain(self) -> None:
        if self.state != "dead":
            self.state = "draining"

    def end(self) -> None:
        """Tell the engine that nothing more will come."""
        self._send([Over()])

    def fail_all(self, sentence: str) -> None:
        """End every request with an error."""
        for answer in self._answers.values():
            answer.put(Failed(sentence))
        self._answers.clear()

    def _take(self, message: Any) -> None:
        if isinstance(message, Ready):
            self.ready = message
            self._on_ready(message)
        elif isinstance(message, Counts):
            self.counts = message
        elif isinstance(message, Failed):
            self._fail(message.sentence)
        else:
            request_id = message.record.request_id if isinstance(message, Passed) else message.id
            answer = self._answers.get(request_id)
            if isinstance(message, (Ended, Rejected)):
                self._answers.pop(request_id, None)
            if answer is not None:
                answer.put(message)

    def _fail(self, sentence: str) -> None:
        if self.state == "dead":
            return
        if self._answers:
            logger.error("ending %s with an error: %s", counted(len(self._answers), "request"), sentence)
        self.state = "dead"
        self.fail_all(sentence)

    def _send(self, messages: Sequence[Any]) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.write(framed(messages))


def _call_names(request_id: str) -> tuple[str, str]:
    """Return what the call of this request can be aborted by: its answer's id, and that without the route's prefix."""
    own = request_id.rpartition("-")[0]
    return own, own.partition("-")[2]
