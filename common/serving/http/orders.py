"""Make what the engine is asked for of a request's fields: `common.requests` in HTTP's names and limits."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from common.config import DecodeConfig, RunConfig
from common.decoding import HOLE, GenerationRequest, Room
from common.errors import ConfigError
from common.requests import CanvasFields, PaceFields, RequestError, RequestMaker, Wishes
from common.serving.http.errors import ApiError
from common.serving.http.fields import ChatFields, Fields, GenerateFields, Sampling
from common.text import PLAIN, Reading

_COMPLETION_TOKENS = 16  # what OpenAI's API says
_MOST_ANSWERS = 64  # of one call
_MOST_STOPS = 16


@dataclass(frozen=True, slots=True)
class Order:
    """One answer of a call. index: its place among the call's choices. prompt_index: its prompt's among the prompts.
    reading: how a chat's answer is read."""

    index: int
    prompt_index: int
    request: GenerationRequest
    decode: DecodeConfig
    reading: Reading = PLAIN

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    def num_filled(self, num_tokens: int) -> int:
        """Return how many of the answer's first tokens were filled by passes; the request gave the others."""
        shown = (self.request.canvas or ())[:num_tokens]
        return num_tokens - len(shown) + shown.count(HOLE)

    def num_new(self, num_before: int, num_tokens: int) -> int:
        """Return how many of the `num_tokens` after the first `num_before` were filled by passes."""
        return self.num_filled(num_before + num_tokens) - self.num_filled(num_before)

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
        """Prompt tokens, of each prompt once, however many answers it gets."""
        return sum({order.prompt_index: order.num_prompt_tokens for order in self.orders}.values())


class OrderBook:
    """Makes orders within the run's limits. Raises ApiError for what cannot be decoded."""

    def __init__(self, run: RunConfig, maker: RequestMaker, num_slots: int) -> None:
        self._run = run
        self._maker = maker
        self._num_slots = num_slots

    def check(self, fields: Sampling, num_prompts: int = 1) -> None:
        """Check everything that needs no prompt."""
        refuse_unsupported(fields)
        self._check_count(fields, num_prompts)
        num_stops = 1 if isinstance(fields.stop, str) else len(fields.stop)
        if num_stops > _MOST_STOPS:
            raise ApiError(400, f"stop: {num_stops} strings, at most {_MOST_STOPS} can be given", "stop")
        self._check_lookahead(fields.diffusion.num_lookahead or 0)

    def is_prepared(self, fields: Sampling) -> bool:
        """Return whether `orders` takes no time, since nothing is left to compile. Raises ApiError."""
        with _naming(fields):
            return self._maker.formats.is_compiled(fields.wishes)

    def prepare(self, fields: Sampling) -> None:
        """Compile what the answers are held to, which may take seconds; `orders` takes no time for it afterwards.
        Raises ApiError for what cannot be compiled."""
        with _naming(fields):
            self._maker.formats.compiled(fields.wishes)

    def orders(self, prefix: str, fields: Sampling, prompts: Sequence[Sequence[int]], header_id: str | None) -> Orders:
        """Make a call's orders. prefix: of the answer's id. header_id: a request id that the body does not name."""
        name = fields.request_id or header_id
        call_id = prefix + (name or uuid.uuid4().hex)
        orders = []
        for place, prompt in enumerate(prompts):
            # With a seed of its own a request is answered alike each time, whatever a proxy calls it.
            noise_name = fields.request_id or ((name or call_id) if fields.seed is None else "")
            if noise_name and place:  # equal prompts of a list are drawn apart
                noise_name += f"-{place}"
            first = self._request(f"{call_id}-{place * fields.n}", tuple(prompt), fields, noise_name)
            decode = first.decode or self._maker.base
            if fields.n > 1 and decode.temperature == 0:
                why = "n: below a temperature of 0.001 all answers are the same; set a higher temperature, or n to 1"
                raise ApiError(400, why, "n")
            reading = self._reading(fields, first)
            for copy in range(fields.n):
                index = place * fields.n + copy
                seed = (self._run.seed if fields.seed is None else fields.seed) + copy
                request = replace(first, id=f"{call_id}-{index}", seed=seed, num_logprobs=fields.num_logprobs)
                orders.append(Order(index, place, request, decode, reading))
        return Orders(call_id, tuple(orders))

    def _reading(self, fields: Sampling, request: GenerationRequest) -> Reading:
        if not isinstance(fields, ChatFields):
            return PLAIN
        if request.automaton is not None and fields.is_held:  # the whole answer is the format's text
            is_call = fields.offered is not None and fields.offered.is_forced
            return Reading("call" if is_call else "content")
        reading = self._maker.prompts.reading(request.prompt, has_calls=fields.offered is not None)
        return reading._replace(is_single=not fields.parallel_tool_calls)

    def _check_count(self, fields: Sampling, num_prompts: int) -> None:
        """Refuse a call of more answers than could ever be taken at once."""
        num_slots = self._num_slots
        count, room = num_prompts * fields.n, num_slots + self._run.serve.max_queued_requests
        limit = min(_MOST_ANSWERS, room)
        if count > limit:
            why = "the most of one call" if limit < room else f"as {num_slots} are decoded and the others wait"
            raise ApiError(
                400,
                f"{num_prompts} prompts times n {fields.n} are {count} answers, at most {limit} can be taken at once, "
                f"{why}: send them in several calls",
                "n" if fields.n > 1 else "prompt",
            )

    def _check_lookahead(self, wanted: int) -> None:
        limit = self._run.serve.max_num_lookahead
        most = self._maker.base.num_lookahead if limit is None else limit
        if wanted > most:
            raise ApiError(
                400, f"diffusion.num_lookahead: {wanted} is more than {most}, the most here", "diffusion.num_lookahead"
            )

    def _wishes(self, fields: Sampling, num_prompt_tokens: int) -> Wishes:
        """Return the wishes with a length, also where the client names none."""
        wishes = fields.wishes
        if wishes.max_tokens is not None or wishes.canvas is not None:
            return wishes
        if isinstance(fields, (ChatFields, GenerateFields)):
            return wishes._replace(max_tokens=self._maker.most_tokens(num_prompt_tokens, fields.diffusion.block_size))
        return wishes._replace(max_tokens=_COMPLETION_TOKENS)

    def _request(self, id: str, prompt: tuple[int, ...], fields: Sampling, noise_name: str) -> GenerationRequest:
        with _naming(fields):
            return self._maker.request(id, prompt, self._wishes(fields, len(prompt)), noise_name)


@contextmanager
def _naming(fields: Sampling) -> Iterator[None]:
    """Make ApiErrors of what cannot be decoded, which name the field as the client has written it."""
    try:
        yield
    except RequestError as error:
        param = error.field
        if param in PaceFields.model_fields or param in CanvasFields.model_fields:
            param = f"diffusion.{param}"
        elif param == "max_tokens":
            param = "max_completion_tokens" if fields.max_completion_tokens else "max_tokens"
        raise ApiError(400, f"{param}: {error.reason}" if param else error.reason, param) from None
    except ConfigError as error:
        raise ApiError(400, str(error)) from None


def refuse_unsupported(fields: Fields) -> None:
    """Refuse fields that are not supported. Raises ApiError."""
    found = fields.unsupported()
    if found is not None:
        raise ApiError(400, found[1], found[0])
