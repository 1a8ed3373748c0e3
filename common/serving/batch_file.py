"""OpenAI's batch files: each line is a request to this server's routes, checked, decoded and answered as over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from common.batch import InputLine, answered, refused, unreadable
from common.config import InputConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import one_line
from common.scoring import request_record
from common.serving.http.errors import ApiError
from common.serving.http.explain import checked, refusing
from common.serving.http.fields import ChatFields, CompletionFields, Sampling
from common.serving.http.orders import Order, OrderBook, Orders
from common.serving.http.responses.logprobs import ToldText
from common.serving.http.responses.whole import Finished, whole_body
from common.serving.messages import Ended
from common.serving.served import check_model, model_names
from common.text import AnswerText

if TYPE_CHECKING:
    from common.generate import Generator


# The fields of each route's bodies, and the prefix of its answers' ids.
_ROUTES: dict[str, tuple[type[Sampling], str]] = {
    "/v1/chat/completions": (ChatFields, "chatcmpl-"),
    "/v1/completions": (CompletionFields, "cmpl-"),
}


@dataclass(slots=True)
class _Call:
    """A line under way. results: of its answers, by index, those that have ended."""

    line: InputLine
    fields: Sampling
    orders: Orders
    results: dict[int, Completion | Rejection] = field(default_factory=dict)


def openai_records(
    generator: Generator, lines: Sequence[InputLine], turns: Iterator[int], source: InputConfig
) -> Iterator[dict[str, Any]]:
    """Yield OpenAI's output line for each line that this replica takes, as they end. A line that is refused costs the
    others nothing.

    lines, turns: as for `common.batch`'s own records.
    """
    door = _Door(generator, source)
    refusals: list[dict[str, Any]] = []
    waiting: dict[str, tuple[_Call, Order]] = {}
    for result in generator.generate(_requests((lines[place] for place in turns), door, refusals, waiting)):
        if result.id in waiting:  # else it is of the leader, who has asked for it
            call, order = waiting.pop(result.id)
            call.results[order.index] = result
            if len(call.results) == len(call.orders.orders):
                yield door.answer(call)
        yield from _drain(refusals)
    yield from _drain(refusals)


def _requests(
    lines: Iterable[InputLine], door: _Door, refusals: list[dict[str, Any]], waiting: dict[str, tuple[_Call, Order]]
) -> Iterator[GenerationRequest]:
    for line in lines:
        is_other = bool(line.fields) and not line.is_openai
        problem = f"line {line.number}: write custom_id, url and body" if is_other else line.error
        if problem is not None:
            refusals.append(unreadable(line.id, problem))
            continue
        try:
            call = door.call(line)
        except ApiError as error:
            refusals.append(refused(line.id, error.status, error.body))
            continue
        waiting.update((order.request.id, (call, order)) for order in call.orders.orders)
        yield from (order.request for order in call.orders.orders)


def _drain(refusals: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while refusals:
        yield refusals.pop(0)


class _Door:
    """What a server's routes do with a body, without a server."""

    def __init__(self, generator: Generator, source: InputConfig) -> None:
        self._generator = generator
        self._names = model_names(generator.run)
        maker = generator.requests_of(source)
        self._prompts = maker.prompts
        self._book = OrderBook(generator.run, maker, generator.run.max_num_requests)

    def call(self, line: InputLine) -> _Call:
        """Make the line's requests. Raises ApiError, and EngineError where no line's prompt could be made here."""
        kind, prefix = _route_of(line.fields)
        body = line.fields.get("body")
        if not isinstance(body, dict):
            raise ApiError(400, "body: write a JSON object, the fields of the request", "body")
        fields = checked(body, kind)
        check_model(fields.model, self._names)
        if fields.stream:
            raise ApiError(400, "stream: a line has the whole answer: remove it", "stream")
        # Keyed by the line's id, so that a run that is resumed draws the same tokens.
        fields = fields.model_copy(update={"request_id": None})
        self._book.check(fields, len(fields.prompts) if isinstance(fields, CompletionFields) else 1)
        return _Call(line, fields, self._book.orders(prefix, fields, self._prompts_of(fields), line.key))

    def answer(self, call: _Call) -> dict[str, Any]:
        """Return the output line of a call that has ended."""
        results = [call.results[order.index] for order in call.orders.orders]
        failed = next((result for result in results if isinstance(result, Rejection)), None)
        if failed is not None:
            status = 500 if failed.finish_reason == "error" else 400
            return refused(call.line.id, status, ApiError(status, failed.reason).body)
        completions = [result for result in results if isinstance(result, Completion)]
        finished = [
            self._finished(order, call.fields, completion)
            for order, completion in zip(call.orders.orders, completions, strict=True)
        ]
        has_echo = isinstance(call.fields, CompletionFields) and call.fields.echo
        decode = self._generator.tokenizer.decode
        body = whole_body(
            call.orders, call.fields, finished, self._strings, model=call.fields.model or self._names[0],
            created=int(time.time()), is_chat=isinstance(call.fields, ChatFields),
            echoes=[decode(one.request.prompt, one.decode.skip_special_tokens) for one in call.orders.orders]
            if has_echo else (),
        )  # fmt: skip
        output = self._generator.run.output
        has_map = output is not None and output.step_map
        return answered(call.line.id, body, _counts(completions, has_step_map=has_map))

    def _prompts_of(self, fields: Sampling) -> list[tuple[int, ...]]:
        with refusing():
            if isinstance(fields, ChatFields):
                return [self._prompts.of_chat(fields.messages, fields.chat_template_kwargs, offered=fields.offered)]
            assert isinstance(fields, CompletionFields), "of the two routes"
            return [
                self._prompts.of_text(one, with_bos=fields.add_special_tokens)
                if isinstance(one, str)
                else self._prompts.of_ids(one)
                for one in fields.prompts
            ]

    def _finished(self, order: Order, fields: Sampling, completion: Completion) -> Finished:
        tokenizer, includes_stop = self._generator.tokenizer, fields.include_stop_str_in_output
        text = ToldText(AnswerText(tokenizer, order.decode, includes_stop=includes_stop))
        written, told = text.end(completion.token_ids, completion.logprobs)
        ended = Ended.of(completion)
        if text.stopped_by is not None:
            ended = ended._replace(finish_reason="stop")
        return Finished(written, completion.token_ids, ended, text.stopped_by, told)

    def _strings(self, token_ids: Sequence[int]) -> list[str]:
        return [self._generator.tokenizer.decode([token], False) for token in token_ids]


def _route_of(fields: Mapping[str, Any]) -> tuple[type[Sampling], str]:
    url, method = fields.get("url"), fields.get("method", "POST")
    if method != "POST":
        raise ApiError(405, one_line(f"method: {method!r:.100}, and routes take POST: write that"), "method")
    route = _ROUTES.get(url) if isinstance(url, str) else None
    if route is None:
        raise ApiError(
            404, one_line(f"url: {url!r:.100} is not answered from a file: write {' or '.join(_ROUTES)}"), "url"
        )
    return route


def _counts(completions: Sequence[Completion], *, has_step_map: bool) -> dict[str, Any]:
    """Return the counts of a record, of all answers of a call together."""
    first = completions[0]
    together = replace(
        first,
        token_ids=tuple(token for one in completions for token in one.token_ids),
        step_map=tuple(step for one in completions for step in one.step_map),
        num_canvas_tokens=sum(one.num_canvas_tokens for one in completions),
        num_forwards=sum(one.num_forwards for one in completions),
        num_lookahead_wins=sum(one.num_lookahead_wins for one in completions),
        num_rows=sum(one.num_rows for one in completions),
        winner_per_step=tuple(winner for one in completions for winner in one.winner_per_step),
        window_per_step=tuple(window for one in completions for window in one.window_per_step),
        first_step_s=max(one.first_step_s for one in completions),
        total_s=max(one.total_s for one in completions),
    )
    record = request_record("", "", together, has_step_map=has_step_map)
    return {name: value for name, value in record.items() if name not in ("id", "text")}
