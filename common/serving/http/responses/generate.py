"""POST /generate: one prompt, with token ids, pass counts and, as a stream, the canvas with its holes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.serving.events import DenoiseEvents
from common.serving.http.fields import GenerateFields
from common.serving.http.responses.calls import Call
from common.serving.http.responses.logprobs import Told, of_rollout
from common.serving.http.responses.sse import DONE, event
from common.serving.http.responses.whole import Finished, finish_reason, judged, pass_counts, usage


@dataclass(slots=True)
class GenerateCall:
    call: Call

    async def body(self) -> dict[str, Any]:
        """Return the whole answer. Raises ApiError."""
        call = self.call
        with call.answering():
            (one,) = await call.whole()
        return self._last(one)

    async def events(self) -> AsyncIterator[str]:
        """Yield the stream's events: texts as they become final or one a pass, then the whole answer, then [DONE]."""
        call, (answer,) = self.call, self.call.answers
        text_of = partial(call.prompts.decode, skip_special_tokens=False)
        drawn = DenoiseEvents(answer.order.num_prompt_tokens, answer.order.decode, text_of, answer.order.request.given)
        is_drawn, text = call.stream_mode == "denoise", ""
        token_ids: tuple[int, ...] = ()
        told: tuple[Told, ...] = ()
        held: dict[str, Any] | None = None  # the last event says why the request ended, which is known after it
        with call.answering():
            async for piece in call.pieces(answer):
                text, token_ids, told = text + piece.text, token_ids + piece.token_ids, told + piece.told
                if piece.passed is not None:
                    if held is not None:
                        yield event(held)
                    held = drawn.of(piece.passed.record)
                elif piece.ended is not None:
                    if held is not None:
                        yield event({**held, "finished": finish_reason(piece.ended)})
                    yield event(self._last(Finished(text, token_ids, piece.ended, piece.stop_reason, told)))
                elif is_drawn:
                    if held is not None:
                        yield event(held)
                    held = None
                else:
                    new = {"id": call.orders.id, "text": piece.text, "token_ids": list(piece.token_ids)}
                    yield event({**new, **self._logprobs(piece.told)})
        yield DONE

    def _last(self, one: Finished) -> dict[str, Any]:
        order, fields = self.call.answers[0].order, self.call.fields
        assert isinstance(fields, GenerateFields), "its route takes no others"
        num_tokens = order.num_filled(one.ended.num_tokens)
        counts = usage(order.num_prompt_tokens, num_tokens, one.ended.num_cached_tokens)
        body = {
            "id": self.call.orders.id,
            "text": one.text,
            "token_ids": list(one.token_ids),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            "weight_version": one.ended.weight_version,
            "usage": counts,
            "diffusion": pass_counts([one.ended], [order]),
        }
        body = judged(body, one.ended, fields)
        if fields.return_step_map:
            body["step_map"] = list(one.ended.step_map)
        if fields.is_rollout:
            body["output_ids"] = list(one.token_ids)
            body["meta_info"] = {
                "id": self.call.orders.id,
                "finish_reason": {"type": one.finish_reason},
                "prompt_tokens": counts["prompt_tokens"],
                "completion_tokens": counts["completion_tokens"],
                "weight_version": one.ended.weight_version,
                **self._logprobs(one.told),
            }
        return body

    def _logprobs(self, told: Sequence[Told]) -> dict[str, Any]:
        """Return what is told of tokens, where it is asked for."""
        if self.call.fields.num_logprobs is None:
            return {}
        return of_rollout(told, self.call.prompts.strings)
