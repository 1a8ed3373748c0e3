"""Rank 0's loop: take what the front end asks for, do a step, tell what it brought."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from common.decoding import EngineCore, Rejection, RequestOutput, Room, StepRecord
from common.errors import EngineError
from common.serving.engine.passes import CountedEngine
from common.serving.link import FRONT_END_GONE, Link, LinkClosed
from common.serving.messages import Abort, Accepted, Add, Ended, Over, Passed, Rejected, Tokens

_IDLE_S = 0.2  # the other ranks of a replica hear of rank 0 so often
_COUNT_S = 0.25


@dataclass(slots=True)
class _Served:
    """A request that has been added. is_cut: it has all the tokens it may have, and was aborted for that."""

    max_tokens: int
    added_at: float
    is_watched: bool
    num_told: int = 0
    is_cut: bool = False


@dataclass(slots=True)
class RequestLoop:
    """From the front end into an EngineCore and back. `is_over` once the front end has said so."""

    core: EngineCore
    engine: CountedEngine
    link: Link
    is_over: bool = False
    _served: dict[str, _Served] = field(default_factory=dict)
    _answers: list[Any] = field(default_factory=list)
    _num_watched: int = 0
    _counted_at: float = 0.0
    _was_idle: bool = False

    def run(self) -> None:
        """Until the front end says that it is over. Raises EngineError where the engine or the front end is gone."""
        self.engine.rooms = self._rooms
        has_peers = self.core.engine.mesh.relay is not None
        try:
            while not self.is_over:
                is_idle = not self.core.has_work
                for message in self.link.receive(_IDLE_S if is_idle else 0.0):
                    self._take(message)
                if has_peers or self.core.has_work:
                    self._tell(self.core.step())
                self._count()
                self.link.send(self._answers)
                self._answers.clear()
        except LinkClosed:
            raise EngineError(FRONT_END_GONE) from None
        self.core.end()

    def _take(self, message: Any) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            self.core.abort(message.id)
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
        self._served[request.id] = _Served(message.max_tokens, time.perf_counter(), message.is_watched)
        self._answers.append(Accepted(request.id))
        if message.is_watched:
            self._num_watched += 1
            self.core.scheduler.observe(self._watch)

    def _watch(self, record: StepRecord) -> None:
        if self._served[record.request_id].is_watched:
            self._answers.append(Passed(record))

    def _tell(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            served = self._served[output.id]
            token_ids = output.token_ids[: served.max_tokens - served.num_told]
            served.num_told += len(token_ids)
            if output.result is not None:
                self._tell_end(output, served, token_ids)
            elif token_ids:
                self._answers.append(Tokens(output.id, token_ids))
                if served.num_told == served.max_tokens:
                    served.is_cut = True
                    self.core.abort(output.id)

    def _tell_end(self, output: RequestOutput, served: _Served, token_ids: tuple[int, ...]) -> None:
        del self._served[output.id]
        if served.is_watched:
            self._num_watched -= 1
            if not self._num_watched:
                self.core.scheduler.observe(None)
        result = output.result
        if isinstance(result, Rejection):
            self._answers.append(Rejected(output.id, result.reason))
            return
        assert result is not None, "its caller has looked"
        is_cut = served.is_cut or len(result.token_ids) > served.max_tokens
        self._answers.append(
            Ended(
                id=output.id,
                token_ids=token_ids,
                finish_reason="length" if is_cut else result.finish_reason,
                num_tokens=served.num_told,
                num_forwards=result.num_forwards,
                num_lookahead_wins=result.num_lookahead_wins,
                num_forced_fills=result.num_forced_fills,
                tokens_per_step=result.tokens_per_step,
                queue_s=max(0.0, time.perf_counter() - served.added_at - result.total_s),
                prefill_s=result.first_step_s,
                total_s=result.total_s,
            )
        )

    def _count(self) -> None:
        """A few times a second, and once when there is nothing more to do."""
        now, is_idle = time.monotonic(), not self.core.has_work
        if now - self._counted_at < _COUNT_S and (not is_idle or self._was_idle):
            return
        self._counted_at, self._was_idle = now, is_idle
        self._answers.append(self.engine.now(len(self.core.scheduler.active), self.core.num_waiting))

    def _rooms(self) -> list[Room]:
        return [Room(decoding.prompt_length, decoding.rules.decode) for decoding in self.core.scheduler.active]
