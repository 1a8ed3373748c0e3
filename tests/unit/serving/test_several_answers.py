"""A call that is answered whole reads its answers side by side: each one's times are its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from common.config import DecodeConfig
from common.decoding import GenerationRequest
from common.serving.http.orders import Order, Orders
from common.serving.http.responses.calls import Call
from common.serving.http.responses.whole import Finished
from common.serving.messages import Ended, Tokens
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
