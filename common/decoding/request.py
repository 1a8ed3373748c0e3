"""Requests and completions, as token ids; tokenizing is the caller's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, NamedTuple

from common.config import DecodeConfig
from common.constraints import Automaton

HOLE = -1  # in the place of a token: a mask
FinishReason = Literal["eos", "stop", "length", "max_steps", "abort"]


class TokenLogprob(NamedTuple):
    """The log probability of a token in the pass that predicted it, and those of the most probable ones (token, log
    probability), best first. Temperature, top_p and top_k have no part in it."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def cut(self, num_top: int) -> TokenLogprob:
        """Return the same with so many alternatives at the most."""
        return self if len(self.top) <= num_top else TokenLogprob(self.logprob, self.top[:num_top])


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to decode. `id` is unique in a run and, together with the seed, keys the request's random numbers.

    decode, seed: the request's own; None: the run's. noise_name: keys the random numbers in the id's place. max_tokens:
    the answer is cut there, whatever its canvas holds. num_logprobs: each token's log probability is wanted, and those
    of so many alternatives; None: none is. automaton: of the texts that the answer may be; None: any. cache_salt: KV
    of prompts is shared with requests of the same one alone. canvas: what stands after the prompt from the first pass
    on, HOLE for masks, and after it end tokens; None: masks. options: texts of the automaton whose probabilities are
    wanted. logit_bias: tokens and what is added to their logits, where the automaton has a class for each
    (`Automaton.apart`). keeps_pace: it says how fast blocks are filled, be it as the run does; no pace changes that.
    """

    id: str
    prompt: tuple[int, ...]
    decode: DecodeConfig | None = None
    seed: int | None = None
    noise_name: str | None = None
    max_tokens: int | None = None
    num_logprobs: int | None = None
    automaton: Automaton | None = None
    cache_salt: str | None = None
    canvas: tuple[int, ...] | None = None
    options: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    keeps_pace: bool = False

    @property
    def given(self) -> dict[int, int]:
        """The tokens of the canvas that are no masks, by position."""
        return {at: token for at, token in enumerate(self.canvas or (), len(self.prompt)) if token != HOLE}


class RequestQueue:
    """The waiting requests of a replica, in order: those that were added, then those of an input, which is read as
    there is room. No two open requests share an id.

    On several ranks rank 0 has the whole queue and releases its first requests to all; only these may be taken.

    requests: the input; it may give None for "nothing now". One that raises, or gives a request whose id is open, has
        ended: what was read before is decoded, then `raise_failure` raises the error.
    open_ids: ids of requests that wait, or that were taken and have not ended.
    """

    def __init__(self, requests: Iterable[GenerationRequest | None] | None = None) -> None:
        self._requests = iter(() if requests is None else requests)
        self._is_exhausted = requests is None
        self._released: OrderedDict[str, GenerationRequest] = OrderedDict()
        self._unreleased: OrderedDict[str, GenerationRequest] = OrderedDict()
        self._reasons: dict[str, str | None] = {}  # why requests that wait are impossible
        self._failure: Exception | None = None
        self.open_ids: set[str] = set()

    def add(self, request: GenerationRequest) -> None:
        """Append a request. Raises ValueError while another request of this id is open."""
        if request.id in self.open_ids:
            raise ValueError(f"request {request.id} is being decoded already: give each request an id of its own")
        self.open_ids.add(request.id)
        self._unreleased[request.id] = request

    def release(self, count: int) -> tuple[GenerationRequest, ...]:
        """Release requests to all ranks until so many are released, or none waits. Returns the newly released ones."""
        released: list[GenerationRequest] = []
        while len(self._released) < count and (self._unreleased or self._pull()):
            released.append(self._unreleased.popitem(last=False)[1])
            self._released[released[-1].id] = released[-1]
        return tuple(released)

    def receive(self, requests: Iterable[GenerationRequest]) -> None:
        """Append what rank 0 has released."""
        self._released.update((request.id, request) for request in requests)

    def first(self) -> GenerationRequest | None:
        """Return the next released request without removing it; None if there is none."""
        return next(iter(self._released.values()), None)

    def take(self) -> None:
        """Remove the request that `first` returns."""
        self._reasons.pop(self._released.popitem(last=False)[0], None)

    def remove(self, request_id: str) -> GenerationRequest | None:
        """Remove and return a waiting request; None if no waiting request has this id."""
        self._reasons.pop(request_id, None)
        return self._released.pop(request_id, None) or self._unreleased.pop(request_id, None)

    def reason(self, request: GenerationRequest, judge: Callable[[GenerationRequest], str | None]) -> str | None:
        """Return what `judge` says of a waiting request, asked once."""
        if request.id not in self._reasons:
            self._reasons[request.id] = judge(request)
        return self._reasons[request.id]

    def prefetch(self, count: int) -> None:
        """Read ahead from the input until so many requests wait."""
        while len(self) < count and self._pull():
            pass

    def __len__(self) -> int:
        """Number of waiting requests, without the unread rest of the input."""
        return len(self._released) + len(self._unreleased)

    def __iter__(self) -> Iterator[GenerationRequest]:
        return chain(self._released.values(), self._unreleased.values())

    @property
    def is_over(self) -> bool:
        return not len(self) and self._is_exhausted

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _pull(self) -> bool:
        """Read one request from the input. Returns whether there was one."""
        if self._is_exhausted:
            return False
        try:
            request = next(self._requests)
            if request is not None:
                self.add(request)
                return True
        except StopIteration:
            self._is_exhausted = True
        except Exception as error:
            self._is_exhausted, self._failure = True, error
        return False


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    token_ids: generated tokens up to the first EOS or stop string, that one included (whole canvas if there is none).
    canvas_token_ids: every opened position, those after the EOS included; positions never filled hold the mask id.
    num_canvas_tokens: the filled ones among them: the published way of counting.
    num_forwards: steps; one step is one forward pass whatever the number of branches.
    winner_per_step: the branch that won each step: 0 is the anchor, j the j-th lookahead.
    window_per_step: positions that the winner computed in each step.
    num_rows: branches computed, of all steps together.
    num_forced_fills: tokens that passed no threshold, each the most confident of a block that had to fill one.
    first_step_s, total_s: seconds from admission to the end of the first step, and to the end.
    step_map: of each of token_ids, the pass whose prediction it is, counted from 1. The tokens of a lookahead that won
    were predicted by the pass before, and seen by the one that it won in.
    logprobs: of each of token_ids, where they were asked for.
    num_cached_tokens: tokens of the prompt whose KV earlier requests had left.
    ways: those of the run's pace that it was decoded in, one after another, with its steps in each.
    option_logprobs: of the request's options, by the first pass: the sum of the log probabilities of each one's tokens,
    its end token included. () where that pass did not predict so many positions.
    """

    id: str
    prompt_length: int
    token_ids: tuple[int, ...]
    canvas_token_ids: tuple[int, ...]
    num_canvas_tokens: int
    num_forwards: int
    num_lookahead_wins: int
    finish_reason: FinishReason
    first_step_s: float
    total_s: float
    tokens_per_step: tuple[int, ...] = field(default=())
    winner_per_step: tuple[int, ...] = field(default=())
    window_per_step: tuple[int, ...] = field(default=())
    num_forced_fills: int = 0
    num_rows: int = 0
    step_map: tuple[int, ...] = field(default=(), compare=False)
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = field(default=0, compare=False)
    ways: tuple[tuple[str, int], ...] = ()
    option_logprobs: tuple[float, ...] = ()

    @classmethod
    def of_nothing(cls, request: GenerationRequest, reason: FinishReason) -> Completion:
        """Return the completion of a request that ended before its first step."""
        return cls(request.id, len(request.prompt), (), (), 0, 0, 0, reason, 0.0, 0.0)

    def cut(self, max_tokens: int) -> Completion:
        """Return the completion cut to so many tokens, with finish reason `length`."""
        return replace(
            self,
            token_ids=self.token_ids[:max_tokens],
            step_map=self.step_map[:max_tokens],
            logprobs=self.logprobs[:max_tokens],
            finish_reason="length",
        )

    @property
    def num_effective_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_forward(self) -> float:
        """Effective TPF: tokens up to and including the first EOS or stop string, over forward steps."""
        return self.num_effective_tokens / max(1, self.num_forwards)


@dataclass(frozen=True, slots=True)
class Rejection:
    """The end of a request that cannot be decoded, or that failed while it was (`error`). It has a completion's counts,
    all of them 0."""

    id: str
    reason: str
    finish_reason: Literal["rejected", "error"] = "rejected"
    token_ids: tuple[int, ...] = ()
    canvas_token_ids: tuple[int, ...] = ()
    num_canvas_tokens: int = 0
    num_effective_tokens: int = 0
    num_forwards: int = 0
    num_lookahead_wins: int = 0
    tokens_per_forward: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a step brought to a request.

    token_ids: tokens of the answer that became final in this step; those of all steps together are the answer.
    result: how the request has ended; None while it goes on. logprobs: of these tokens, where they were asked for.
    """

    id: str
    token_ids: tuple[int, ...]
    result: Completion | Rejection | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
