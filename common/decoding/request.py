"""What goes into the engine and what comes out: one request, one completion. Token ids only; text is the caller's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.config import DecodeConfig

FinishReason = Literal["eos", "stop", "length", "max_steps", "abort"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`id` is unique in a run and keys the request's random numbers, together with the seed.

    decode, seed: the request's own; None: the run's. noise_name: keys the random numbers in the id's place.
    """

    id: str
    prompt: tuple[int, ...]
    decode: DecodeConfig | None = None
    seed: int | None = None
    noise_name: str | None = None


class RequestQueue:
    """Requests that wait, in their order: those added, and behind them those of an input, read as they are wanted.

    requests: the input; it may give None for "nothing now". One that raises has ended: what was read before is decoded,
    then `raise_failure` hands the error on.
    """

    def __init__(self, requests: Iterable[GenerationRequest | None] | None = None) -> None:
        self._requests = iter(() if requests is None else requests)
        self._is_exhausted = requests is None
        self._read: deque[GenerationRequest] = deque()
        self._failure: Exception | None = None

    def add(self, request: GenerationRequest) -> None:
        self._read.append(request)

    def first(self) -> GenerationRequest | None:
        """The one to come next, which stays until it is taken. None: nobody waits now."""
        if not self._read:
            self._pull()
        return self._read[0] if self._read else None

    def prefetch(self, count: int) -> None:
        """Read the next requests now, while there is time; as many as wait now."""
        while len(self._read) < count and self._pull():
            pass

    def take(self) -> GenerationRequest:
        """The first, which no longer waits."""
        return self._read.popleft()

    def take_up_to(self, count: int) -> tuple[GenerationRequest, ...]:
        """As many as wait now."""
        return tuple(self.take() for _ in range(count) if self.first() is not None)

    def remove(self, request_id: str) -> GenerationRequest | None:
        """The request, if it has been read and waits."""
        found = next((request for request in self._read if request.id == request_id), None)
        if found is not None:
            self._read.remove(found)
        return found

    @property
    def read(self) -> Sequence[GenerationRequest]:
        """Those that wait, without the input's rest."""
        return self._read

    @property
    def is_over(self) -> bool:
        return not self._read and self._is_exhausted

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _pull(self) -> bool:
        """Whether the input had another."""
        if self._is_exhausted:
            return False
        try:
            request = next(self._requests)
        except StopIteration:
            self._is_exhausted = True
        except Exception as error:
            self._is_exhausted, self._failure = True, error
        else:
            if request is not None:
                self._read.append(request)
                return True
        return False


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    token_ids: generated tokens up to the first EOS or stop string, that one included (whole canvas if there is none).
    canvas_token_ids: every opened position, behind the EOS too; positions never filled hold the mask id.
    num_canvas_tokens: the filled ones among them: the published way of counting.
    num_forwards: steps; one step is one forward pass whatever the number of branches.
    winner_per_step: the branch that won each step: 0 is the anchor, j the j-th lookahead.
    window_per_step: positions that the winner computed in each step.
    num_rows: branches computed, of all steps together.
    num_forced_fills: tokens that passed no threshold, each the most confident of a block that had to fill one.
    first_step_s, total_s: seconds from admission to the end of the first step, and to the end.
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

    @classmethod
    def of_nothing(cls, request: GenerationRequest, reason: FinishReason) -> Completion:
        """Of a request that ends before it began."""
        return cls(request.id, len(request.prompt), (), (), 0, 0, 0, reason, 0.0, 0.0)

    @property
    def num_effective_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_forward(self) -> float:
        """Effective TPF: tokens up to and including the first EOS or stop string, over forward steps."""
        return self.num_effective_tokens / max(1, self.num_forwards)

    @property
    def canvas_tokens_per_forward(self) -> float:
        return self.num_canvas_tokens / max(1, self.num_forwards)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that cannot be decoded; the rest of the run goes on. It can be read as a completion of nothing."""

    id: str
    reason: str
    finish_reason: Literal["rejected"] = "rejected"
    token_ids: tuple[int, ...] = ()
    canvas_token_ids: tuple[int, ...] = ()
    num_canvas_tokens: int = 0
    num_effective_tokens: int = 0
    num_forwards: int = 0
    num_lookahead_wins: int = 0
    tokens_per_forward: float = 0.0
    canvas_tokens_per_forward: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a step brought to a request.

    token_ids: of the answer, those that became final in this step, in order: all steps' together are the answer.
    result: what the request has ended with; None while it goes on.
    """

    id: str
    token_ids: tuple[int, ...]
    result: Completion | Rejection | None = None
