"""The engines as seen from the front end. Requests go to the replica that has the fewest; their results come back. If a
replica ends, what it had not begun goes to another."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from common.decoding import Order as EngineOrder
from common.serving.http.engines.replica import Answer, Replica
from common.serving.http.errors import ApiError
from common.serving.http.orders import Order
from common.serving.link import read_batch
from common.serving.messages import (
    TAKEN_ID,
    Abort,
    AbortCall,
    Aborted,
    Add,
    Ask,
    Continue,
    Counts,
    Ended,
    Failed,
    Obeyed,
    Over,
    Passed,
    Pause,
    Ready,
    Rejected,
    call_names,
)
from common.tables import counted

logger = logging.getLogger(__name__)
_GONE = "the engine has ended; start the server again"
_NOT_READY = {
    "loading": "the model is being loaded; send it again once GET /ready answers 200",
    "draining": "the server is being shut down, and takes no more requests",
}


class QueueFull(ApiError):
    """A refusal because the queue is full."""


class EngineClient:
    """The front end's ends of the links.

    is_loaded: whether this process has what it takes to make requests. ready: what the first engine to be ready has
    said of itself. on_ready: called with the number of an engine that takes requests, and what it says of itself.
    most_silent_s: a loaded engine that says nothing for longer counts as stuck. It speaks a few times a second, but not
    within a pass: a thread beside its loop could speak then too, and would go on when the loop hangs.
    """

    def __init__(
        self,
        max_queued: int,
        on_ready: Callable[[int, Ready], None],
        most_silent_s: float = math.inf,
        num_replicas: int = 1,
        num_front_ends: int = 1,
    ) -> None:
        self.replicas = [Replica(number) for number in range(num_replicas)]
        self.ready: Ready | None = None
        self.is_loaded = False
        self._is_draining = False
        self._max_queued = max_queued
        self._on_ready = on_ready
        self._most_silent_s = most_silent_s
        self._num_front_ends = num_front_ends
        self._next = 0  # of replicas that have as few requests, the first from here on
        self._awaited: dict[tuple[int | str, int], asyncio.Future[Any]] = {}  # what is told, by call and replica
        self._num_aborts = 0

    @property
    def state(self) -> str:
        """`loading`, `ready`, `draining` or `dead`."""
        states = {replica.state for replica in self.replicas}
        if states == {"dead"}:
            return "dead"
        if self._is_draining:
            return "draining"
        return "ready" if self.is_loaded and "ready" in states else "loading"

    @property
    def num_open(self) -> int:
        """Requests of this front end that have not ended."""
        return sum(len(replica.answers) for replica in self.replicas)

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = 0) -> None:
        """Read from a replica until it is gone."""
        replica = self.replicas[number]
        replica.begin(writer)
        sentence = _GONE if len(self.replicas) == 1 else f"replica {number} has ended"
        try:
            while True:
                messages = await read_batch(reader)
                replica.hear()
                for message in messages:
                    if isinstance(message, Failed):
                        sentence = message.sentence
                        self._lose(replica, sentence)
                    self._take(replica, message)
        except (asyncio.IncompleteReadError, OSError):
            self._lose(replica, sentence)
        finally:
            writer.close()

    def submit(self, orders: Sequence[Order], *, is_watched: bool = False) -> list[Answer]:
        """Send orders. Raises QueueFull where no more can be taken now, ApiError where a call of that name is open."""
        self.require_ready()
        usable = self._usable()
        num_slots = sum(replica.ready.num_slots for replica in usable if replica.ready)
        if sum(replica.num_under_way for replica in usable) + len(orders) > num_slots + self._max_queued:
            raise QueueFull(503, f"the queue is full ({self._max_queued} requests wait): send it again later")
        names = {name for order in orders for name in call_names(order.request.id)}
        if any(name in names for one in self._open_answers() for name in call_names(one.id)):
            raise ApiError(400, TAKEN_ID, "request_id")
        answers = [Answer(order, is_watched=is_watched) for order in orders]
        self._send_off(answers)
        return answers

    def require_alive(self) -> None:
        """Raise ApiError where every engine is gone, or says nothing for too long. A load may take any time."""
        alive = [replica for replica in self.replicas if replica.state != "dead"]
        if not alive:
            raise ApiError(503, _GONE if len(self.replicas) == 1 else "no replica is there; they are started again")
        if all(self._is_stuck(replica) for replica in alive):
            silent_s = min(replica.silent_s for replica in alive)
            raise ApiError(
                503,
                f"the engine has said nothing for {silent_s:.0f} s, more than serve.engine_silence_s "
                f"({self._most_silent_s:g} s): it is stuck, or in a very long pass; this ends when it speaks again",
            )

    def require_ready(self) -> None:
        """Raise ApiError saying why no request can be taken."""
        self.require_alive()
        if self._is_draining or not (self.is_loaded and self._usable()):
            raise ApiError(503, _NOT_READY["draining" if self._is_draining else "loading"])

    def abort(self, answers: Sequence[Answer]) -> None:
        """Abort those of these answers that have not ended."""
        for replica in self.replicas:
            replica.send([Abort(answer.id) for answer in answers if answer.id in replica.answers])

    async def abort_call(self, call_id: str | None) -> int:
        """Abort all requests of a call by its answer's id, with its prefix or without; None: of all calls. Return how
        many: those of other front ends too, of which engines tell between two passes."""
        if self._num_front_ends == 1:
            found = [one for one in self._open_answers() if call_id is None or call_id in call_names(one.id)]
            self.abort(found)
            return len(found)
        self._num_aborts += 1
        number, asked = self._num_aborts, [replica.number for replica in self._usable()]
        counts = await self._told(number, AbortCall(number, call_id), asked)
        return sum(count or 0 for count in counts.values())

    async def ask(
        self, what: EngineOrder | Pause | Continue, key: str, *, is_aborting: bool = False,
        to: Sequence[int] | None = None,
    ) -> dict[int, Obeyed | None]:  # fmt: skip
        """Have replicas do something beside answers, all of them unless `to` has their numbers. Return what each says;
        None of one that has ended. key: of the call, see `Ask`. Raises ApiError where one of all is not ready."""
        if to is None:
            self.require_ready()
            if len(self._usable()) < len(self.replicas):
                raise ApiError(503, "not all replicas are ready: send it again once GET /ready lists all of them so")
            to = range(len(self.replicas))
        return await self._told(key, Ask(key, what, is_aborting), to)

    @property
    def weight_version(self) -> str:
        """The version of the weights in force."""
        replica = next((one for one in self.replicas if one.state == "ready"), self.replicas[0])
        return replica.counts.weight_version

    def drain(self) -> None:
        self._is_draining = True

    def end(self) -> None:
        """Tell the engines that nothing more will come."""
        for replica in self.replicas:
            replica.send([Over()])

    def fail_all(self, sentence: str, status: int = 500) -> None:
        """End every request with an error."""
        for answer in self._open_answers():
            answer.put(Failed(sentence, status))
        for replica in self.replicas:
            replica.answers.clear()

    def lose_all(self, sentence: str) -> None:
        """Take all replicas for gone, with an error for every request."""
        self.fail_all(sentence)
        for replica in self.replicas:
            self._lose(replica, sentence)

    async def _told(self, key: int | str, message: AbortCall | Ask, to: Sequence[int]) -> dict[int, Any]:
        """Send a message to the replicas of these numbers. Return what each says to it; None of one that has ended."""
        futures = {number: asyncio.get_running_loop().create_future() for number in to}
        self._awaited |= {(key, number): future for number, future in futures.items()}
        try:
            for number, future in futures.items():
                if self.replicas[number].state == "dead":
                    future.set_result(None)
                self.replicas[number].send([message])
            return {number: await future for number, future in futures.items()}
        finally:
            for number in futures:
                del self._awaited[key, number]

    def _open_answers(self) -> list[Answer]:
        return [answer for replica in self.replicas for answer in replica.answers.values()]

    def _is_stuck(self, replica: Replica) -> bool:
        return replica.state == "ready" and replica.silent_s > self._most_silent_s

    def _usable(self) -> list[Replica]:
        return [one for one in self.replicas if one.state == "ready" and not self._is_stuck(one)]

    def _send_off(self, answers: Sequence[Answer]) -> None:
        """Send each request where the fewest would wait, then where the fewest are under way, in turns where that is
        equal. With no replica left they end with an error."""
        dealt: dict[int, list[Add]] = {}
        usable = self._usable()
        for answer in answers:
            if not usable:
                answer.put(Rejected(answer.id, "no replica is ready: send it again later", 503))
                continue
            replica = min(usable, key=self._load)
            self._next = replica.number + 1
            replica.answers[answer.id], answer.replica = answer, replica.number
            dealt.setdefault(replica.number, []).append(answer.message)
        for number, messages in dealt.items():
            self.replicas[number].send(messages)

    def _load(self, replica: Replica) -> tuple[int, int, int]:
        place = (replica.number - self._next) % len(self.replicas)
        return replica.num_waiting, replica.num_under_way, place

    def _take(self, replica: Replica, message: Any) -> None:
        if isinstance(message, Ready):
            replica.state, replica.ready = "ready", message
            self.ready = self.ready or message
            self._on_ready(replica.number, message)
        elif isinstance(message, Counts):
            replica.count(message)
        elif isinstance(message, Aborted):
            self._note(message.number, replica, message.num_requests)
        elif isinstance(message, Obeyed):
            self._note(message.key, replica, message)
        elif not isinstance(message, Failed):
            request_id = message.record.request_id if isinstance(message, Passed) else message.id
            answer = replica.answers.get(request_id)
            if isinstance(message, (Ended, Rejected)):
                replica.answers.pop(request_id, None)
            if answer is not None:
                answer.put(message)

    def _lose(self, replica: Replica, sentence: str) -> None:
        """Send what the replica had not begun to another, once, since it may be what ended it; end the rest."""
        if replica.state == "dead":
            return
        left = replica.end()
        moved = [answer for answer in left if len(self.replicas) > 1 and not answer.has_begun and not answer.has_moved]
        ended = [answer for answer in left if answer not in moved]
        if left:
            others = f", sending {len(moved)} to another replica" if moved else ""
            logger.error("ending %s with an error%s: %s", counted(len(ended), "request"), others, sentence)
        for answer in ended:
            answer.put(Failed(sentence))
        for answer in moved:
            answer.has_moved = True
        self._send_off(moved)
        for key, _ in [*self._awaited]:
            self._note(key, replica, None)

    def _note(self, key: int | str, replica: Replica, said: int | Obeyed | None) -> None:
        """Note what a replica first says to what it was asked, unless another front end has asked."""
        future = self._awaited.get((key, replica.number))
        if future is not None and not future.done():
            future.set_result(said)
