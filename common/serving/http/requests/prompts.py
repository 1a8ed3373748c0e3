"""Texts and conversations to token ids, and ids to texts, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from common.checkpoint import CharacterBound, Tokenizer, character_bound, chat_text
from common.config import DecodeConfig
from common.errors import ConfigError, EngineError, first_line
from common.serving.http.errors import ApiError
from common.serving.http.requests.fields import Message
from common.serving.http.requests.orders import Order
from common.text import AnswerText

_LONG = 20_000  # characters: shorter texts are tokenised faster than a thread is asked to


class Prompts:
    """The model's tokenizer for a server.

    add_bos: put the begin token in front of plain prompts. max_tokens: positions of the longest request.
    """

    def __init__(self, tokenizer: Tokenizer, *, add_bos: bool, max_tokens: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._add_bos = add_bos
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._bound: CharacterBound | None = character_bound(tokenizer)
        # A conversation may wait for a slow template, and must not keep plain prompts waiting.
        self._chats = ThreadPoolExecutor(1, "chat")
        self._texts = ThreadPoolExecutor(1, "tokenize")
        if tokenizer.has_chat_template:  # in a process that takes seconds to start
            self._chats.submit(chat_text, tokenizer, [{"role": "user", "content": ""}])

    async def of_text(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Raises ApiError."""
        self._check_length(text, param)
        add_bos = self._add_bos and add_special_tokens
        if len(text) <= _LONG:
            return self._encode(text, add_bos, param)
        encode = partial(self._encode, text, add_bos, param, is_long=True)
        return await asyncio.get_running_loop().run_in_executor(self._texts, encode)

    def of_ids(self, token_ids: Sequence[int], param: str = "prompt") -> list[int]:
        """Raises ApiError for ids that are none, and for the mask's, which a prompt cannot hold."""
        if not token_ids:
            raise ApiError(400, f"{param}: it is empty; send at least one token", param)
        largest, mask_id = max(token_ids), self._tokenizer.mask_id
        if largest >= self._vocab_size or mask_id in token_ids:
            what = f"{mask_id} is the mask token" if mask_id in token_ids else f"{largest} is no token of this model"
            raise ApiError(400, f"{param}: {what}; use this model's tokenizer", param)
        return list(token_ids)

    async def of_chat(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[int]:
        """Token ids up to where the answer begins. Raises ApiError."""
        if not self._tokenizer.has_chat_template:
            raise ApiError(400, "messages: this model has no chat template; send prompt to /v1/completions", "messages")
        given = [message.given for message in messages]
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(self._chats, chat_text, self._tokenizer, given, variables)
        except ConfigError as error:
            raise ApiError(400, first_line(error), "messages") from None
        except EngineError as error:
            raise ApiError(503, first_line(error)) from None
        return await self.of_text(text, add_special_tokens=False, param="messages")

    def answer_text(self, decode: DecodeConfig, *, includes_stop: bool) -> AnswerText:
        return AnswerText(self._tokenizer, decode, includes_stop=includes_stop)

    def echo(self, order: Order) -> str:
        return self.decode(order.request.prompt, skip_special_tokens=order.decode.skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def decode_known(self, token_ids: Sequence[int]) -> str:
        """Special tokens too. Raises ApiError for ids that are none."""
        largest = max(token_ids, default=0)
        if largest >= self._vocab_size:
            raise ApiError(400, f"tokens: {largest} is no token of this model; use its own tokenizer", "tokens")
        return self.decode(token_ids, skip_special_tokens=False)

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text."""
        return [self.decode([token], skip_special_tokens=False) for token in token_ids]

    def _encode(self, text: str, add_bos: bool, param: str, *, is_long: bool = False) -> list[int]:
        try:
            return self.of_ids(self._tokenizer.encode(text, add_bos, beside_others=is_long), param)
        except ConfigError as error:
            raise ApiError(400, f"{param}: {first_line(error)}", param) from None

    def _check_length(self, text: str, param: str) -> None:
        if len(text) <= _LONG or self._bound is None:
            return
        most = self._bound.of(text, self._max_tokens)
        if len(text) > most:
            raise ApiError(
                400, f"{param}: {len(text)} characters, at most {most} can fit into {self._max_tokens} tokens", param
            )
