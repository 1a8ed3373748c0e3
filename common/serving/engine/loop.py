"""Rank 0's loop: take what the front end asks for, do a step, tell what it brought."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.decoding import EngineCore, Rejection, RequestOutput, Room, StepRecord
from common.serving.engine.control import Control
from common.serving.engine.links import Links
from common.serving.engine.passes import CountedEngine
from common.serving.messages import Abort, Accepted, Add, Ask, Ended, Over, Passed, Rejected, Tokens

logger = logging.getLogger(__name__)
_IDLE_S = 0.2  # the other ranks of a replica hear of rank 0 so often
_COUNT_S = 0.25
_LAGS = (
    "the server cannot hand out the passes of its requests as fast as they come: send fewer requests with stream_mode "
    "denoise at once, or read them faster"
)


@dataclass(slots=True)
class _Served:
    """A request that has been added. num_final: tokens that are final, told of or not. is_lost: its passes cannot be
    told, and it was aborted for that."""

    added_at: float
    num_final: int = 0
    is_lost: bool = False


@dataclass(slots=True)
class RequestLoop:
    """Rank 0's loop: takes requests from the front ends, steps the core, sends back what came of them. `is_over` once
    the front ends have said so.

    A front end that lags costs its own clients their streams of passes, and other clients nothing: what has become
    final for it waits here, together, until it reads again. in_force: as Control's.
    """

    core: EngineCore
    engine: CountedEngine
    link: Links
    in_force: Path | None = None
    is_over: bool = False
    _served: dict[str, _Served] = field(default_factory=dict)
    _watched: set[str] = field(default_factory=set)
    _untold: dict[str, Tokens] = field(default_factory=dict)
    _answers: list[Any] = field(default_factory=list)
    _counted_at: float = 0.0
    _was_idle: bool = False
    control: Control = field(init=False)

    def __post_init__(self) -> None:
        self.control = Control(self.core, self.engine, lambda: tuple(self._served), self.in_force)

    def run(self) -> None:
        """Run until the front end says that it is over. Raises EngineError where the engine is gone, LinkClosed where
        the front end is."""
        self.engine.rooms = self._rooms
        has_peers = self.core.engine.mesh.relay is not None
        while not self.is_over:
            is_idle = not self.core.has_work
            for message in self.link.receive(_IDLE_S if is_idle else 0.0):
                self._take(message)
            if has_peers or self.core.has_work:
                self._tell(self.core.step())
            told = self.control.go_on()
            self._lose_watched()
            self._flush()
            self._count(is_due=bool(told))
            self._answers += told
            self.link.send(self._answers)
            self._answers.clear()
        self.core.end()

    def _take(self, message: Any) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            self.core.abort(message.id)
        elif isinstance(message, Ask):
            self.control.take(message)
        elif isinstance(message, Over):
            self.is_over = True

    def _add(self, message: Add) -> None:
        request = message.request
        try:
            reason = self.core.why_impossible(request)
            if reason is None:
                self.core.add_request(request)
        except ValueError as error:
            reason = str(error)
        if reason is not None:
            self._answers.append(Rejected(request.id, reason))
            return
        self._served[request.id] = _Served(time.perf_counter())
        self._answers.append(Accepted(request.id))
        if message.is_watched:
            self._watched.add(request.id)
            self.core.scheduler.observe(self._watch, self._watched)

    def _watch(self, record: StepRecord) -> None:
        self._answers.append(Passed(record))

    def _unwatch(self, request_id: str) -> None:
        self._watched.discard(request_id)
        if not self._watched:
            self.core.scheduler.observe(None)

    def _lose_watched(self) -> None:
        """Give up watching for front ends that lag."""
        for request_id in [one for one in self._watched if self.link.is_behind(one)]:
            logger.warning("%s: %s", request_id, _LAGS)
            self._served[request_id].is_lost = True
            self._unwatch(request_id)
            self.core.abort(request_id)

    def _flush(self) -> None:
        for request_id in [one for one in self._untold if not self.link.is_behind(one)]:
            self._answers.append(self._untold.pop(request_id))

    def _tell(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            served = self._served[output.id]
            served.num_final += len(output.token_ids)
            untold = self._untold.pop(output.id, None)
            told = Tokens(output.id, output.token_ids, output.logprobs)
            if untold is not None:
                told = Tokens(output.id, untold.token_ids + told.token_ids, untold.logprobs + told.logprobs)
            if output.result is not None:
                self._tell_end(output, served, told)
            elif told.token_ids and not served.is_lost:
                self._untold[output.id] = told

    def _tell_end(self, output: RequestOutput, served: _Served, last: Tokens) -> None:
        del self._served[output.id]
        self._unwatch(output.id)
        result = output.result
        if served.is_lost:
            self._answers.append(Rejected(output.id, _LAGS, 503))
            return
        if isinstance(result, Rejection):
            is_ours = result.finish_reason == "error"
            if is_ours:
                logger.warning("%s: %s", output.id, result.reason)
            self._answers.append(Rejected(output.id, result.reason, 500 if is_ours else 400))
            return
        assert result is not None, "its caller has looked"
        self._answers.append(
            Ended.of(result)._replace(
                token_ids=last.token_ids,
                logprobs=last.logprobs,
                queue_s=max(0.0, time.perf_counter() - served.added_at - result.total_s),
                weight_version=self.engine.weight_version,
            )
        )

    def _count(self, *, is_due: bool) -> None:
        """Tell the counts a few times a second, once when there is nothing more to do, and where it is due."""
        now, is_idle = time.monotonic(), not self.core.has_work
        if not is_due and now - self._counted_at < _COUNT_S and (not is_idle or self._was_idle):
            return
        self._counted_at, self._was_idle = now, is_idle
        scheduler = self.core.scheduler
        counts = self.engine.now(len(scheduler.active), self.core.num_waiting)
        counts.prefix_queries, counts.prefix_hits = scheduler.num_queried, scheduler.num_hit
        counts.ways = scheduler.steps_by_way()
        self._answers.append(counts)

    def _rooms(self) -> list[Room]:
        return [Room(decoding.prompt_length, decoding.rules.decode) for decoding in self.core.scheduler.active]
