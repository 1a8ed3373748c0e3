"""Whole answers in the words of OpenAI's API, for a call over HTTP and for a line of a batch file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.serving.http.fields import Sampling
from common.serving.http.orders import Order, Orders
from common.serving.http.responses.logprobs import TextOf, Told, of_chat, of_completion
from common.serving.http.responses.said import spoken
from common.serving.messages import Ended
from common.text import MessageReader, Reading

_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "max_steps": "length", "abort": "abort"}


class Finished(NamedTuple):
    text: str
    token_ids: tuple[int, ...]
    ended: Ended
    stop_reason: str | int | None
    told: tuple[Told, ...] = ()

    @property
    def finish_reason(self) -> str:
        return finish_reason(self.ended)


def finish_reason(ended: Ended) -> str:
    """Return the finish reason in OpenAI's words."""
    return _REASONS[ended.finish_reason]


def usage(num_prompt_tokens: int, num_tokens: int, num_cached: int | None = None) -> dict[str, Any]:
    """num_tokens: filled by passes. num_cached: None: not known yet."""
    counts = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
    return counts if num_cached is None else {**counts, "prompt_tokens_details": {"cached_tokens": num_cached}}


def num_cached(ended: Sequence[Ended], orders: Sequence[Order]) -> int:
    """Return how many tokens of a call's prompts were computed for none of their answers. orders: theirs, in any
    order."""
    prompt_of = {order.request.id: order.prompt_index for order in orders}
    least: dict[int, int] = {}
    for one in ended:
        place = prompt_of[one.id]
        least[place] = min(one.num_cached_tokens, least.get(place, one.num_cached_tokens))
    return sum(least.values())


def num_filled(ended: Sequence[Ended], orders: Sequence[Order]) -> int:
    """Return how many tokens of a call's answers passes have filled. orders: theirs, in any order."""
    order_of = {order.request.id: order for order in orders}
    return sum(order_of[one.id].num_filled(one.num_tokens) for one in ended)


def pass_counts(ended: Sequence[Ended], orders: Sequence[Order]) -> dict[str, Any]:
    """Return what `diffusion.stats` asks for, of all answers of a call. orders: theirs, in any order."""
    room_of = {order.request.id: order.room for order in orders}
    blocks = [room_of[one.id].num_blocks(room_of[one.id].prompt_length + one.num_tokens) for one in ended]
    num_forwards = sum(one.num_forwards for one in ended)
    return {
        "forwards": num_forwards,
        "tokens_per_forward": num_filled(ended, orders) / max(1, num_forwards),
        "lookahead_wins": sum(one.num_lookahead_wins for one in ended),
        "forced_fills": sum(one.num_forced_fills for one in ended),
        "blocks": sum(blocks),
    }


def head(kind: str, id: str, model: str, created: int) -> dict[str, Any]:
    """Return what every body and chunk begins with."""
    return {"id": id, "object": kind, "created": created, "model": model, "system_fingerprint": None}


def whole_body(
    orders: Orders, fields: Sampling, finished: Sequence[Finished], text_of: TextOf, *, model: str, created: int,
    is_chat: bool, echoes: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the body of a completion or a chat. text_of: each token's own text. echoes: a text in front of each
    answer, by index; empty: none."""
    kind = "chat.completion" if is_chat else "text_completion"
    ended = [one.ended for one in finished]
    body = {
        **head(kind, orders.id, model, created),
        "choices": [
            _chat_choice(index, one, fields, orders.orders[index].reading, text_of)
            if is_chat
            else _choice(index, one, fields, echoes[index] if echoes else "", text_of)
            for index, one in enumerate(finished)
        ],
        "usage": usage(orders.num_prompt_tokens, num_filled(ended, orders.orders), num_cached(ended, orders.orders)),
    }
    if fields.diffusion.stats:
        body["diffusion"] = pass_counts(ended, orders.orders)
    return body


def judged(choice: dict[str, Any], ended: Ended, fields: Sampling) -> dict[str, Any]:
    """Return a choice with how probable each text of its format is, and all of them together, where that is asked for;
    null where the first pass did not see to their ends."""
    if not fields.diffusion.choice_probabilities:
        return choice
    texts, logprobs = dict.fromkeys((fields.structured_outputs or {})["choice"]), ended.option_logprobs
    if not logprobs:
        return {**choice, "choice_probabilities": None, "choice_mass": None}
    top = max(logprobs)
    weights = [math.exp(one - top) for one in logprobs]
    shares = {text: weight / sum(weights) for text, weight in zip(texts, weights, strict=True)}
    return {**choice, "choice_probabilities": shares, "choice_mass": min(1.0, sum(map(math.exp, logprobs)))}


def with_ids(choice: dict[str, Any], token_ids: tuple[int, ...], fields: Sampling) -> dict[str, Any]:
    """Return a choice with its token ids, where they are asked for."""
    return {**choice, "token_ids": list(token_ids)} if fields.return_token_ids else choice


def shown_logprobs(told: Sequence[Told], fields: Sampling, text_of: TextOf, *, is_chat: bool) -> dict[str, Any] | None:
    """Return a choice's `logprobs`; None where none are asked for."""
    if fields.num_logprobs is None:
        return None
    return of_chat(told, text_of) if is_chat else of_completion(told, text_of)


def _choice(index: int, one: Finished, fields: Sampling, echo: str, text_of: TextOf) -> dict[str, Any]:
    logprobs = shown_logprobs(one.told, fields, text_of, is_chat=False)
    rest = {"logprobs": logprobs, "finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
    made = with_ids({"index": index, "text": echo + one.text, **rest}, one.token_ids, fields)
    return judged(made, one.ended, fields)


def _chat_choice(index: int, one: Finished, fields: Sampling, reading: Reading, text_of: TextOf) -> dict[str, Any]:
    said = MessageReader(reading).add(one.text, is_last=True)
    logprobs = shown_logprobs(one.told, fields, text_of, is_chat=True)
    reason = "tool_calls" if said.calls else one.finish_reason
    rest = {"logprobs": logprobs, "finish_reason": reason, "stop_reason": one.stop_reason}
    message = {"role": "assistant", **spoken(said)}
    made = with_ids({"index": index, "message": message, **rest}, one.token_ids, fields)
    return judged(made, one.ended, fields)
