"""Texts and conversations to token ids, and ids to texts, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from common.checkpoint import Tokenizer
from common.config import DecodeConfig
from common.errors import EngineError, first_line
from common.requests import LONG, Offered, PromptMaker
from common.serving.http.errors import ApiError
from common.serving.http.explain import refusing
from common.serving.http.orders import Order
from common.text import AnswerText


class Prompts:
    """The model's tokenizer for a server. All raise ApiError for what is no prompt."""

    def __init__(self, tokenizer: Tokenizer, maker: PromptMaker, vocab_size: int) -> None:
        self.maker = maker
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # A conversation may wait for a slow template, and must not keep plain prompts waiting.
        self._chats = ThreadPoolExecutor(1, "chat")
        self._texts = ThreadPoolExecutor(1, "tokenize")
        if tokenizer.has_chat_template:  # in a process that takes seconds to start
            self._chats.submit(tokenizer.chat_text, [{"role": "user", "content": ""}])

    async def of_text(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> tuple[int, ...]:
        make = partial(self.maker.of_text, text, with_bos=add_special_tokens, field=field)
        with refusing():
            if len(text) <= LONG:
                return make()
            self.maker.check_length(text, field)  # those that are too long wait for nobody
            return await asyncio.get_running_loop().run_in_executor(self._texts, partial(make, beside_others=True))

    def of_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        with refusing():
            return self.maker.of_ids(token_ids)

    async def of_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], offered: Offered | None = None
    ) -> tuple[int, ...]:
        """Token ids up to where the answer begins."""
        with refusing():
            loop = asyncio.get_running_loop()
            try:
                text = await loop.run_in_executor(
                    self._chats, self.maker.chat_text, messages, variables, "messages", offered
                )
            except EngineError as error:  # no template can be rendered now
                raise ApiError(503, first_line(error)) from None
        return await self.of_text(text, add_special_tokens=False, field="messages")

    def answer_text(self, decode: DecodeConfig, *, includes_stop: bool) -> AnswerText:
        return AnswerText(self._tokenizer, decode, includes_stop=includes_stop)

    def echo(self, order: Order) -> str:
        return self.decode(order.request.prompt, skip_special_tokens=order.decode.skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def decode_known(self, token_ids: Sequence[int]) -> str:
        """Return a text with its special tokens. Raises ApiError for ids that are none."""
        largest = max(token_ids, default=0)
        if largest >= self._vocab_size:
            raise ApiError(400, f"tokens: {largest} is no token of this model; use its own tokenizer", "tokens")
        return self.decode(token_ids, skip_special_tokens=False)

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's own text."""
        return [self.decode([token], skip_special_tokens=False) for token in token_ids]
