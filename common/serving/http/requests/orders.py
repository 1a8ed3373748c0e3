"""From the fields of a request to what the engine is asked for. Raises ApiError for what cannot be decoded."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from common.config import DecodeConfig, RunConfig
from common.decoding import GenerationRequest
from common.serving.http.errors import ApiError
from common.serving.http.requests.fields import ChatFields, GenerateFields, Sampling
from common.serving.messages import Ready

_NO_EOS = -1  # nothing ends the text
_OWN_SETTINGS = ("num_lookahead", "block_size", "block_add_threshold", "decoded_token_threshold", "skip_threshold")
_SAMPLING = ("temperature", "top_p", "top_k", "stop")


@dataclass(frozen=True, slots=True)
class Order:
    """One answer of a call. index: its place among the call's choices. prompt_index: its prompt's among the prompts."""

    index: int
    prompt_index: int
    request: GenerationRequest
    max_tokens: int
    decode: DecodeConfig

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class Orders:
    """What one call asks for. id: of the answer, which the log and abort_request name too."""

    id: str
    orders: tuple[Order, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt once, however many answers it gets."""
        return sum({order.prompt_index: order.num_prompt_tokens for order in self.orders}.values())


class OrderBook:
    """Makes orders by the run's settings and limits."""

    def __init__(self, run: RunConfig, ready: Ready) -> None:
        self._run = run
        self._ready = ready

    def check(self, fields: Sampling, num_prompts: int = 1) -> None:
        """Everything that needs no prompt."""
        if (param := fields.unsupported()) is not None:
            raise ApiError(
                400, f"{param}: a diffusion model does not decode token by token and cannot do this: remove it", param
            )
        limit = self._run.serve.max_prompts
        if num_prompts * fields.n > limit:
            what = f"{num_prompts} prompts times n {fields.n}"
            raise ApiError(400, f"{what} are more than {limit} answers: send less", "n" if fields.n > 1 else "prompt")
        if len(_stops(fields)) > self._run.serve.max_stop_strings:
            limit = self._run.serve.max_stop_strings
            raise ApiError(400, f"stop: {len(_stops(fields))} strings, at most {limit} can be given", "stop")

    def orders(self, prefix: str, fields: Sampling, prompts: Sequence[Sequence[int]], header_id: str | None) -> Orders:
        """prefix: of the answer's id. header_id: a request id that the body does not name."""
        name = fields.request_id or header_id
        call_id = prefix + (name or uuid.uuid4().hex)
        if fields.n > 1 and self._decode(fields, 1).temperature == 0:
            raise ApiError(400, "n: without temperature all answers are one; set temperature, or n to 1", "n")
        orders = []
        for place, prompt in enumerate(prompts):
            max_tokens, decode = self._lengths(fields, len(prompt))
            for copy in range(fields.n):
                index = place * fields.n + copy
                seed = (self._run.seed if fields.seed is None else fields.seed) + copy
                # With a seed of its own a request is answered alike each time.
                noise_name = name or (f"{call_id}-{place}" if fields.seed is None else "")
                request = GenerationRequest(f"{call_id}-{index}", tuple(prompt), decode, seed, noise_name)
                orders.append(Order(index, place, request, max_tokens, decode))
        return Orders(call_id, tuple(orders))

    def _lengths(self, fields: Sampling, num_prompt_tokens: int) -> tuple[int, DecodeConfig]:
        """The most tokens of the answer, and settings whose canvas of whole blocks holds them."""
        context = self._ready.max_model_len
        max_tokens = self._max_tokens(fields, num_prompt_tokens)
        decode = self._decode(fields, max_tokens)
        if num_prompt_tokens + decode.max_new_tokens > context:
            what = f"max_tokens {max_tokens}"
            if decode.max_new_tokens > max_tokens:
                what += f", which take whole blocks up to {decode.max_new_tokens},"
            raise ApiError(
                400,
                f"the prompt of {num_prompt_tokens} tokens and {what} are more than the model's context of {context} "
                "tokens: shorten the prompt, or lower max_tokens",
                "max_tokens",
            )
        return max_tokens, decode

    def _max_tokens(self, fields: Sampling, num_prompt_tokens: int) -> int:
        wanted = fields.max_completion_tokens or fields.max_tokens
        if wanted is not None:
            return wanted
        if not isinstance(fields, (ChatFields, GenerateFields)):
            return 16  # what OpenAI's API says
        room = self._ready.max_model_len - num_prompt_tokens
        size = fields.diffusion.block_size or self._ready.decode.block_size
        return max(1, min(self._ready.decode.max_new_tokens, room // size * size))

    def _decode(self, fields: Sampling, max_tokens: int) -> DecodeConfig:
        base = self._ready.decode
        given = {name: getattr(fields.diffusion, name) for name in _OWN_SETTINGS}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._check_lookahead(changes.get("num_lookahead", 0))
        changes |= {name: value for name in ("temperature", "top_p") if (value := getattr(fields, name)) is not None}
        if fields.top_k is not None:
            changes["top_k"] = fields.top_k if fields.top_k > 0 else None
        if changes.get("temperature", base.temperature) == 0:
            changes |= {"top_p": 1.0, "top_k": None}
        if _stops(fields):
            changes["stop"] = _stops(fields)
        if fields.ignore_eos:
            changes["eos_token_id"] = _NO_EOS
        size = 1 if base.strategy == "vanilla" else changes.get("block_size", base.block_size)
        changes["max_new_tokens"] = -(-max_tokens // size) * size
        changes["max_steps"] = None if max_tokens > base.max_new_tokens else base.max_steps
        try:
            return DecodeConfig.model_validate({**dict(base), **changes})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            param = f"diffusion.{name}" if name in _OWN_SETTINGS else name if name in _SAMPLING else "max_tokens"
            raise ApiError(400, f"{param}: {first['msg'].removeprefix('Value error, ')}", param) from None

    def _check_lookahead(self, wanted: int) -> None:
        limit = self._run.serve.max_num_lookahead
        most = self._ready.decode.num_lookahead if limit is None else limit
        if wanted > most:
            raise ApiError(
                400, f"diffusion.num_lookahead: {wanted} is more than {most}, the most here", "diffusion.num_lookahead"
            )


def _stops(fields: Sampling) -> tuple[str, ...]:
    return (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
