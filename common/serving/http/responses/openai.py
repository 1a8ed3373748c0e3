"""OpenAI's routes: the bodies of completions and chats, whole or as chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from common.serving.http.fields import StreamOptions
from common.serving.http.responses.calls import Call, Piece, merged
from common.serving.http.responses.said import spoken
from common.serving.http.responses.sse import DONE, event
from common.serving.http.responses.whole import (
    finish_reason,
    head,
    judged,
    num_cached,
    pass_counts,
    shown_logprobs,
    usage,
    whole_body,
    with_ids,
)
from common.text import MessageReader


@dataclass(slots=True)
class OpenAiCall:
    """echoes: a text in front of each answer, by index; empty: none."""

    call: Call
    model: str
    is_chat: bool
    echoes: list[str] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    async def body(self) -> dict[str, Any]:
        """Return the whole answer; where it was aborted, what it has. Raises ApiError."""
        call = self.call
        with call.answering():
            finished = await call.whole()
        return whole_body(
            call.orders, call.fields, finished, call.prompts.strings, model=self.model, created=self.created,
            is_chat=self.is_chat, echoes=self.echoes,
        )  # fmt: skip

    async def events(self) -> AsyncIterator[str]:
        """Yield the stream's events, [DONE] last. Raises ApiError where it cannot be finished."""
        call, options = self.call, self.call.fields.stream_options or StreamOptions()
        num_filled, ended = 0, []
        num_tokens = [0] * len(call.answers)
        readers = [MessageReader(answer.order.reading) for answer in call.answers]
        with call.answering():
            if self.is_chat:
                for index in range(len(call.answers)):
                    yield self._chunk([self._delta(index, {"role": "assistant", "content": ""}, None)], options, 0)
            else:
                for index, text in enumerate(self.echoes):
                    if text:
                        yield self._chunk([self._text_part(index, Piece(text, ()), None)], options, 0)
            async for index, piece in merged([call.pieces(answer) for answer in call.answers]):
                num_filled += call.answers[index].order.num_new(num_tokens[index], len(piece.token_ids))
                num_tokens[index] += len(piece.token_ids)
                if piece.ended is not None:
                    ended.append(piece.ended)
                for choice in self._parts(index, piece, readers[index]):
                    yield self._chunk([choice], options, num_filled)
        if options.include_usage or call.fields.diffusion.stats:
            last = {**self._head(self._chunk_kind), "choices": []}
            if options.include_usage:
                cached = num_cached(ended, call.orders.orders)
                last["usage"] = usage(call.orders.num_prompt_tokens, num_filled, cached)
            if call.fields.diffusion.stats:
                last["diffusion"] = pass_counts(ended, call.orders.orders)
            yield event(last)
        yield DONE

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return head(kind, self.call.orders.id, self.model, self.created)

    def _chunk(self, choices: list[dict[str, Any]], options: StreamOptions, num_filled: int) -> str:
        body: dict[str, Any] = {**self._head(self._chunk_kind), "choices": choices}
        if options.include_usage:
            shown = usage(self.call.orders.num_prompt_tokens, num_filled)
            body["usage"] = shown if options.continuous_usage_stats else None
        return event(body)

    def _parts(self, index: int, piece: Piece, reader: MessageReader) -> list[dict[str, Any]]:
        """Return a piece's choices: a chat has the text and the reason one after another."""
        reason = None if piece.ended is None else finish_reason(piece.ended)
        if not self.is_chat:
            is_silent = not (piece.text or piece.token_ids or reason)
            return [] if is_silent else [self._text_part(index, piece, reason)]
        parts = []
        num_calls = reader.num_calls
        said = reader.add(piece.text, is_last=reason is not None)
        if any(said) or piece.token_ids or piece.told:
            delta = {**self._delta(index, spoken(said, num_calls), None), "logprobs": self._logprobs(piece)}
            parts.append(with_ids(delta, piece.token_ids, self.call.fields))
        if reason is not None:
            reason = "tool_calls" if reader.num_calls else reason
            parts.append({**self._delta(index, {}, reason), "stop_reason": piece.stop_reason})
            parts[-1] = self._judged(parts[-1], piece)
        return parts

    def _text_part(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }
        return self._judged(with_ids(choice, piece.token_ids, self.call.fields), piece)

    def _judged(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        return choice if piece.ended is None else judged(choice, piece.ended, self.call.fields)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.told:
            return None
        return shown_logprobs(piece.told, self.call.fields, self.call.prompts.strings, is_chat=self.is_chat)

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
