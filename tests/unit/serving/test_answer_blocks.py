"""`stream_mode: block` and `stats` count an answer's blocks where the model has its borders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.config import DecodeConfig
from common.decoding import GenerationRequest
from common.serving.http.orders import Order, Orders
from common.serving.http.responses.calls import Call
from common.serving.http.responses.whole import pass_counts
from common.serving.messages import Ended, Tokens
from common.text import AnswerText, Writing


def order(strategy: str, prompt_length: int, name: str = "a") -> Order:
    decode = DecodeConfig.model_validate({"strategy": strategy, "block_size": 4, "max_new_tokens": 16})
    return Order(0, 0, GenerationRequest(name, (5,) * prompt_length, decode), decode)


def sent(one: Order, stream_mode: str) -> list[int]:
    """Lengths of what a stream sends of eleven tokens that become final one by one."""

    async def parts() -> AsyncIterator[Any]:
        for token in range(11):
            yield Tokens("a", (token,))
        yield Ended("a", (), "length", num_tokens=11, num_forwards=11)

    async def lengths() -> list[int]:
        answer = cast("Any", SimpleNamespace(order=one, id="a", added_at=0.0, parts=parts))
        return [len(piece.token_ids) async for piece in call.pieces(answer)]

    nobody = SimpleNamespace(first_token=lambda *_: None, tokens=lambda *_: None, ended=lambda *_: None)
    tokenizer = SimpleNamespace(writing=Writing(), decode=lambda ids, skip_special_tokens: "x" * len(ids))
    prompts = SimpleNamespace(answer_text=partial(AnswerText, tokenizer))
    fields = SimpleNamespace(include_stop_str_in_output=False)
    call = Call(cast("Any", None), Orders("a", (one,)), *cast("Any", (fields, [], prompts, nobody, stream_mode)))
    return asyncio.run(lengths())


@pytest.mark.parametrize(
    ("strategy", "prompt_length", "expected"),
    [
        ("d2f", 7, [4, 4, 3]),
        ("block_diffusion", 8, [4, 4, 3]),
        ("block_diffusion", 7, [1, 4, 4, 2]),
        ("block_diffusion", 2, [2, 4, 4, 1]),
        ("fast_dllm_v2", 5, [3, 4, 4, 0]),
    ],
)
def test_whole_blocks_are_sent(strategy: str, prompt_length: int, expected: list[int]) -> None:
    one = order(strategy, prompt_length)
    assert sent(one, "block") == expected
    assert sent(one, "prefix") == [*[1] * 11, 0]
    blocks = pass_counts([Ended("a", (), "length", num_tokens=11)], [one])["blocks"]
    assert blocks == len([length for length in expected if length])


def test_blocks_of_several_answers_are_their_own() -> None:
    orders = [order("block_diffusion", 7, "a"), order("block_diffusion", 8, "b")]
    ended = [Ended("b", (), "length", num_tokens=5), Ended("a", (), "length", num_tokens=5)]
    assert pass_counts(ended, orders)["blocks"] == 4
    assert pass_counts([Ended("a", (), "eos", num_tokens=0)], orders)["blocks"] == 0
