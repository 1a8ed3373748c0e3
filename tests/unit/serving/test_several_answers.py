"""A call of several answers: read side by side, each with times of its own, and aborted together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.config import DecodeConfig
from common.decoding import GenerationRequest
from common.serving.http.engines.replica import GIVEN_UP, OTHER_FAILED, Answer
from common.serving.http.errors import ApiError
from common.serving.http.orders import Order, Orders
from common.serving.http.responses.calls import Call
from common.serving.http.responses.whole import Finished
from common.serving.messages import Ended, Rejected, Tokens
from common.text import AnswerText, Writing


def test_an_answer_is_counted_when_it_ends_and_not_behind_those_before_it() -> None:
    counted: list[int] = []

    async def whole() -> list[Finished]:
        second_is_counted = asyncio.Event()

        def ended(answer: Any, *rest: Any) -> None:
            counted.append(answer.order.index)
            second_is_counted.set()

        async def slow() -> AsyncIterator[Any]:
            yield Tokens("a-0", (1, 2))
            await second_is_counted.wait()
            yield Ended("a-0", (3,), "length", num_tokens=3)

        async def fast() -> AsyncIterator[Any]:
            yield Ended("a-1", (4,), "eos", num_tokens=1)

        decode = DecodeConfig()
        orders = [Order(i, i, GenerationRequest(f"a-{i}", (5,), decode), decode) for i in range(2)]
        answers = [
            SimpleNamespace(order=order, id=order.request.id, added_at=0.0, parts=parts)
            for order, parts in zip(orders, (slow, fast), strict=True)
        ]
        metrics = SimpleNamespace(first_token=lambda *_: None, tokens=lambda *_: None, ended=ended)
        text_of = SimpleNamespace(writing=Writing(), decode=lambda ids, skip_special_tokens: "".join(map(str, ids)))
        prompts = SimpleNamespace(answer_text=partial(AnswerText, text_of))
        fields = SimpleNamespace(include_stop_str_in_output=False)
        call = Call(
            cast("Any", None), Orders("a", tuple(orders)), *cast("Any", (fields, answers, prompts, metrics, "prefix"))
        )
        return await asyncio.wait_for(call.whole(), 60)

    found = asyncio.run(whole())
    assert counted == [1, 0]
    assert [(one.text, one.token_ids, one.finish_reason) for one in found] == [
        ("123", (1, 2, 3), "length"),
        ("4", (4,), "stop"),
    ]


@pytest.mark.parametrize("has_failed", [True, False])
def test_only_a_client_that_goes_gives_answers_up(has_failed: bool, caplog: pytest.LogCaptureFixture) -> None:
    aborted: list[Any] = []
    given_up: list[Any] = []
    closed: list[bool] = []
    decode = DecodeConfig()
    orders = [Order(i, i, GenerationRequest(f"a-{i}", (5,), decode), decode) for i in range(2)]
    answers = [Answer(order) for order in orders]
    engine, metrics = SimpleNamespace(abort=aborted.extend), SimpleNamespace(given_up=given_up.extend)
    spans = SimpleNamespace(close=lambda _, *, has_failed: closed.append(has_failed))
    prompts = SimpleNamespace(answer_text=partial(AnswerText, SimpleNamespace(writing=Writing())))
    fields = SimpleNamespace(include_stop_str_in_output=False)
    call = Call(*cast("Any", (engine, Orders("a", tuple(orders)), fields, answers, prompts, metrics, "prefix", spans)))

    async def answered() -> None:
        with call.answering():
            await call.whole()

    async def ended() -> None:
        waiting = asyncio.ensure_future(answered())
        await asyncio.sleep(0)
        if has_failed:
            answers[0].put(Rejected("a-0", "not finite", 500))
        else:
            waiting.cancel()
        with pytest.raises(ApiError if has_failed else asyncio.CancelledError):
            await asyncio.wait_for(waiting, 60)

    with caplog.at_level(logging.INFO):
        asyncio.run(ended())
    left = answers[1:] if has_failed else answers
    assert aborted == left and given_up == ([] if has_failed else answers) and closed == [has_failed]
    assert (GIVEN_UP in caplog.text, OTHER_FAILED in caplog.text) == (not has_failed, has_failed)


@pytest.mark.parametrize(
    ("is_over", "has_failed", "told"),
    [
        (True, True, ("engine", "the engine did not answer")),
        (False, True, ("engine", OTHER_FAILED)),
        (False, False, ("client_gone", GIVEN_UP)),
    ],
)
def test_a_span_without_an_answer_tells_why(is_over: bool, has_failed: bool, told: tuple[str, str]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from common.serving.http.traces import Spans

    sent: list[tuple[str, str]] = []
    tracer = SimpleNamespace(send=lambda spans, answer, attributes, why: sent.append((attributes["error.type"], why)))
    one = cast("Any", SimpleNamespace(id="a", is_over=is_over))
    Spans(cast("Any", tracer), "cmpl-a", {}).close([one], has_failed=has_failed)
    assert sent == [told]
