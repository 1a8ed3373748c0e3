"""A request's way through the front end: sent off, followed, given up when its client goes, counted and logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fastapi import Request

from common.decoding import TokenLogprob
from common.serving.http.engines.client import EngineClient
from common.serving.http.engines.replica import GIVEN_UP, OTHER_FAILED, Answer
from common.serving.http.errors import ApiError
from common.serving.http.fields import Sampling
from common.serving.http.metrics import Metrics
from common.serving.http.orders import Order, Orders
from common.serving.http.responses.logprobs import Told, ToldText
from common.serving.http.responses.whole import Finished, finish_reason
from common.serving.messages import Ended, Passed
from common.tables import counted

if TYPE_CHECKING:
    from common.serving.http.prompts import Prompts
    from common.serving.http.traces import Spans

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class Piece(NamedTuple):
    """What a pass, or several, added to an answer. passed: of a watched request. ended, stop_reason: in the last piece,
    the latter the stop string or the stop token that ended it. told: of the tokens that the text holds, which may be
    others than token_ids; empty where no log probabilities are asked for."""

    text: str
    token_ids: tuple[int, ...]
    passed: Passed | None = None
    ended: Ended | None = None
    stop_reason: str | int | None = None
    told: tuple[Told, ...] = ()


def _joined(pieces: Sequence[Piece]) -> Finished:
    ended, stop_reason = pieces[-1].ended, pieces[-1].stop_reason
    assert ended is not None, "the last piece has it"
    token_ids = tuple(token for piece in pieces for token in piece.token_ids)
    told = tuple(one for piece in pieces for one in piece.told)
    return Finished("".join(piece.text for piece in pieces), token_ids, ended, stop_reason, told)


@dataclass(slots=True)
class Call:
    """The answers that one HTTP request waits for. spans: what traces them, where that is wanted."""

    engine: EngineClient
    orders: Orders
    fields: Sampling
    answers: list[Answer]
    prompts: Prompts
    metrics: Metrics
    stream_mode: str
    spans: Spans | None = None

    async def pieces(self, answer: Answer) -> AsyncIterator[Piece]:
        """Yield the answer in pieces. Raises ApiError where the engine fails."""
        order = answer.order
        includes_stop = self.fields.include_stop_str_in_output
        text = ToldText(self.prompts.answer_text(order.decode, includes_stop=includes_stop))
        pending: tuple[int, ...] = ()  # final, but of a block that is not
        logprobs: tuple[TokenLogprob, ...] = ()  # theirs
        num_given = 0
        first_at: float | None = None
        async for part in answer.parts():
            if isinstance(part, Passed):
                yield Piece("", (), passed=part)
                continue
            if part.token_ids and first_at is None:
                first_at = time.monotonic()
                self.metrics.first_token(answer, first_at - answer.added_at)
            self.metrics.tokens(answer, order.num_new(num_given + len(pending), len(part.token_ids)))
            pending, logprobs = pending + part.token_ids, logprobs + part.logprobs
            if isinstance(part, Ended):
                last, told = text.end(pending, logprobs)
                if text.stopped_by is not None:  # where the answer is cut at max_tokens, only its text tells
                    part = part._replace(finish_reason="stop")
                self._log(answer, part, first_at)
                yield Piece(last, pending, ended=part, stop_reason=text.stopped_by, told=told)
                return
            whole = self._num_whole(order, num_given + len(pending)) - num_given
            ready, pending = pending[:whole], pending[whole:]
            num_given += whole
            if ready:
                new, told = text.add(ready, logprobs[:whole])
                logprobs = logprobs[whole:]
                yield Piece(new, ready, told=told)

    def _num_whole(self, order: Order, num_final: int) -> int:
        """Return how many tokens can be sent once so many are final."""
        if self.stream_mode != "block":
            return num_final
        size, shared = order.decode.block_size, order.num_prompt_tokens - order.room.block_start
        return max(0, (shared + num_final) // size * size - shared)

    async def whole(self) -> list[Finished]:
        """Return all answers, read side by side: their times are taken as their parts come. Raises ApiError."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async for index, piece in merged([self.pieces(answer) for answer in self.answers]):
            pieces[index].append(piece)
        return [_joined(own) for own in pieces]

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Abort, at the end, what has not ended: its client is gone, or another answer of the call failed."""
        has_failed = False
        try:
            yield
        except Exception:  # a client that goes cancels this
            has_failed = True
            raise
        finally:
            left = [answer for answer in self.answers if not answer.is_over]
            if left:
                why = OTHER_FAILED if has_failed else GIVEN_UP
                logger.info("%s: %s", ", ".join(answer.id for answer in left[:3]), why)
                if not has_failed:
                    self.metrics.given_up(left)
                self.engine.abort(left)
            if self.spans is not None:
                self.spans.close(self.answers, has_failed=has_failed)

    def _log(self, answer: Answer, ended: Ended, first_at: float | None) -> None:
        seconds = time.monotonic() - answer.added_at
        decode_s = None if first_at is None else time.monotonic() - first_at
        self.metrics.ended(answer, ended, finish_reason(ended), seconds, decode_s)
        if self.spans is not None:
            self.spans.ended(answer, ended, finish_reason(ended), first_at)
        logger.info(
            "%s: %s, %s in %s, %.0f ms, %s",
            answer.id, counted(answer.order.num_prompt_tokens, "prompt token"),
            counted(answer.order.num_filled(ended.num_tokens), "token"), counted(ended.num_forwards, "pass", "es"),
            1000 * seconds, ended.finish_reason,
        )  # fmt: skip


async def unless_gone(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """Return the work's result, which is cancelled when the client goes. Raises ApiError then, which nobody reads."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection")
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def merged(streams: list[AsyncIterator[ResultT]]) -> AsyncIterator[tuple[int, ResultT]]:
    """Yield (index, item) of all streams as they come. Raises what one of them raises."""
    queue: asyncio.Queue[tuple[int, ResultT] | BaseException | None] = asyncio.Queue()

    async def drain(index: int, stream: AsyncIterator[ResultT]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(drain(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
