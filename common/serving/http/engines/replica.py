"""One engine as a front end sees it, and the requests that it has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from common.serving.automata import SentAutomata
from common.serving.http.errors import ApiError
from common.serving.http.orders import Order
from common.serving.link import framed
from common.serving.messages import Accepted, Add, Counts, Ended, Failed, Passed, Ready, Rejected, Tokens

GIVEN_UP = "given up by its client"  # why an answer is aborted
OTHER_FAILED = "aborted, since another answer of its call failed"


class Answer:
    """One request that has gone to an engine, and what has come of it.

    replica: where it is. has_begun: whether something of it has come, so that it cannot begin anew elsewhere.
    has_moved: whether it is at its second replica.
    """

    def __init__(self, order: Order, *, is_watched: bool = False) -> None:
        self.order = order
        self.id = order.request.id
        self.added_at = time.monotonic()
        self.replica = 0
        self.has_moved = False
        self.has_begun = False
        self.is_over = False
        self._is_watched = is_watched
        self._decided = asyncio.Event()
        self._refusal: ApiError | None = None
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    @property
    def message(self) -> Add:
        """What asks an engine for it."""
        return Add(self.order.request, self._is_watched)

    def put(self, message: Any) -> None:
        self.is_over = self.is_over or isinstance(message, (Ended, Rejected, Failed))
        if not self._decided.is_set():
            self._refusal = None if isinstance(message, Accepted) else _error_of(message)
            self._decided.set()
        if not isinstance(message, Accepted):
            self.has_begun = True
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
    return ApiError(message.status, message.sentence)


class Replica:
    """An engine, over all of its starts.

    state: `loading`, `ready` or `dead`. ready: what it has said of itself. counts: the last that it has told. answers:
    this front end's open requests by id. num_ends: how often it has ended. num_others: requests that it had beside
    this front end's, by its last counts.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = "loading"
        self.ready: Ready | None = None
        self.counts = Counts()
        self.answers: dict[str, Answer] = {}
        self.num_ends = 0
        self.num_others = 0
        self._heard_at = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._sent = SentAutomata()

    def begin(self, writer: asyncio.StreamWriter) -> None:
        """Take a start's connection."""
        self.state, self._writer, self._sent = "loading", writer, SentAutomata()
        self.hear()

    def hear(self) -> None:
        """Note that it has said something."""
        self._heard_at = time.monotonic()

    def end(self) -> list[Answer]:
        """Note that it is gone. Returns the requests that it had open."""
        self.state, self._writer = "dead", None
        self.counts.num_running_now = self.counts.num_waiting_now = self.num_others = 0
        self.counts.kv_usage = 0.0
        self.num_ends += 1
        left, self.answers = [*self.answers.values()], {}
        return left

    def count(self, counts: Counts) -> None:
        self.counts = counts
        self.num_others = max(0, counts.num_running_now + counts.num_waiting_now - len(self.answers))

    @property
    def num_under_way(self) -> int:
        """Requests that it has, those of all front ends."""
        return len(self.answers) + self.num_others

    @property
    def num_waiting(self) -> int:
        """Requests that have no room yet."""
        return max(0, self.num_under_way - (self.ready.num_slots if self.ready else 0))

    @property
    def silent_s(self) -> float:
        """Seconds since its last word."""
        return time.monotonic() - self._heard_at

    def send(self, messages: Sequence[Any]) -> None:
        if self._writer is not None and messages:
            with suppress(OSError):
                self._writer.write(framed(messages, self._sent))
