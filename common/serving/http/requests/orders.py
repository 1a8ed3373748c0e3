"""From the fields of a request to what the engine is asked for. Raises ApiError for what cannot be decoded."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from common.config import BLOCKS_FROM_ZERO, DecodeConfig, RunConfig, is_greedy, remedy
from common.decoding import GenerationRequest, Room
from common.serving.http.errors import ApiError
from common.serving.http.requests.fields import ChatFields, Fields, GenerateFields, Sampling
from common.serving.messages import Ready

_NO_EOS = -1  # nothing ends the text
_OWN_SETTINGS = ("num_lookahead", "block_size", "block_add_threshold", "decoded_token_threshold", "skip_threshold")
_SAMPLING = ("temperature", "top_p", "top_k", "stop", "stop_token_ids")


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

    @property
    def room(self) -> Room:
        return Room(self.num_prompt_tokens, self.decode)


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
        refuse_unsupported(fields)
        self._check_count(fields, num_prompts)
        if len(_stops(fields)) > self._run.serve.max_stop_strings:
            limit = self._run.serve.max_stop_strings
            raise ApiError(400, f"stop: {len(_stops(fields))} strings, at most {limit} can be given", "stop")

    def _check_count(self, fields: Sampling, num_prompts: int) -> None:
        """What could never be taken at once is no matter of coming again later."""
        serve, num_slots = self._run.serve, self._ready.num_slots
        count, room = num_prompts * fields.n, num_slots + serve.max_queued_requests
        limit = min(serve.max_prompts, room)
        if count > limit:
            why = "the most of one call" if limit < room else f"as {num_slots} are decoded and the others wait"
            raise ApiError(
                400,
                f"{num_prompts} prompts times n {fields.n} are {count} answers, at most {limit} can be taken at once, "
                f"{why}: send them in several calls",
                "n" if fields.n > 1 else "prompt",
            )

    def orders(self, prefix: str, fields: Sampling, prompts: Sequence[Sequence[int]], header_id: str | None) -> Orders:
        """prefix: of the answer's id. header_id: a request id that the body does not name."""
        name = fields.request_id or header_id
        call_id = prefix + (name or uuid.uuid4().hex)
        if fields.n > 1 and self._decode(fields, 1).temperature == 0:
            why = "n: at temperature 0, and below 0.001, all answers are one; set temperature, or n to 1"
            raise ApiError(400, why, "n")
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
        num_positions = Room(num_prompt_tokens, decode).num_positions
        if num_positions > context:
            what, name = f"{_length_name(fields)} {max_tokens}", _length_name(fields)
            if num_positions > num_prompt_tokens + max_tokens:
                what += f", which take whole blocks up to {num_positions - num_prompt_tokens},"
                if max_tokens <= (fields.diffusion.block_size or 0):  # one block, however few tokens
                    name = "diffusion.block_size"
            raise ApiError(
                400,
                f"the prompt of {num_prompt_tokens} tokens and {what} are more than the model's context of {context} "
                f"tokens: shorten the prompt, or lower {name}",
                name,
            )
        return max_tokens, decode

    def _max_tokens(self, fields: Sampling, num_prompt_tokens: int) -> int:
        wanted = fields.max_completion_tokens or fields.max_tokens
        if wanted is not None:
            return wanted
        if not isinstance(fields, (ChatFields, GenerateFields)):
            return 16  # what OpenAI's API says
        size = fields.diffusion.block_size or self._ready.decode.block_size
        # Blocks begin behind the prompt, or at position 0.
        begin = 0 if self._ready.decode.strategy in BLOCKS_FROM_ZERO else num_prompt_tokens
        end = begin + (self._ready.max_model_len - begin) // size * size
        return max(1, min(self._ready.decode.max_new_tokens, end - num_prompt_tokens))

    def _decode(self, fields: Sampling, max_tokens: int) -> DecodeConfig:
        base = self._ready.decode
        given = {name: getattr(fields.diffusion, name) for name in _OWN_SETTINGS}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._check_lookahead(changes.get("num_lookahead", 0))
        changes |= {name: value for name in ("temperature", "top_p") if (value := getattr(fields, name)) is not None}
        if fields.top_k is not None:
            changes["top_k"] = fields.top_k if fields.top_k > 0 else None
        if is_greedy(changes.get("temperature", base.temperature)):
            changes |= {"top_p": 1.0, "top_k": None}
        # Beside those of the run, which every answer ends with.
        changes["stop"] = tuple(dict.fromkeys([*_stops(fields), *base.stop]))
        changes["stop_token_ids"] = tuple(dict.fromkeys([*fields.stop_token_ids, *base.stop_token_ids]))
        if fields.skip_special_tokens is not None:
            changes["skip_special_tokens"] = fields.skip_special_tokens
        if fields.ignore_eos:
            changes["eos_token_id"] = _NO_EOS
        takes_any = base.strategy in ("vanilla", *BLOCKS_FROM_ZERO)
        size = 1 if takes_any else changes.get("block_size", base.block_size)
        changes["max_new_tokens"] = -(-max_tokens // size) * size
        changes["max_steps"] = None if max_tokens > base.max_new_tokens else base.max_steps
        try:
            return base.changed(changes)
        except ValidationError as error:
            first = error.errors()[0]
            problem = remedy(first, first["loc"], DecodeConfig)
            # Of settings that contradict each other the sentence names all, and the client has sent one of them.
            named = first["loc"] or re.findall(r"\w+", problem)
            name = next((str(name) for name in named if name in changes and name in _OWN_SETTINGS + _SAMPLING), None)
            param = f"diffusion.{name}" if name in _OWN_SETTINGS else name or _length_name(fields)
            raise ApiError(400, f"{param}: {problem}", param) from None

    def _check_lookahead(self, wanted: int) -> None:
        limit = self._run.serve.max_num_lookahead
        most = self._ready.decode.num_lookahead if limit is None else limit
        if wanted > most:
            raise ApiError(
                400, f"diffusion.num_lookahead: {wanted} is more than {most}, the most here", "diffusion.num_lookahead"
            )


def refuse_unsupported(fields: Fields) -> None:
    """Raises ApiError."""
    found = fields.unsupported()
    if found is not None:
        raise ApiError(400, found[1], found[0])


def _length_name(fields: Sampling) -> str:
    """Of the field that says the most tokens."""
    return "max_completion_tokens" if fields.max_completion_tokens else "max_tokens"


def _stops(fields: Sampling) -> tuple[str, ...]:
    return (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
