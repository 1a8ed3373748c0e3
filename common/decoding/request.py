"""What goes into the engine and what comes out: one request, one completion. Token ids only; text is the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["eos", "stop", "length", "max_steps"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`id` is unique in a run and keys the request's random numbers, together with the run's seed."""

    id: str
    prompt: tuple[int, ...]


class RequestQueue:
    """Requests in order, pulled one ahead at most; the first stays until it is taken, so it can wait for room.

    An input that raises has ended: what was admitted before is decoded, then `raise_failure` hands the error on.
    """

    def __init__(self, requests: Iterator[GenerationRequest]) -> None:
        self._requests = requests
        self._first: GenerationRequest | None = None
        self._failure: Exception | None = None

    def first(self) -> GenerationRequest | None:
        """None: there are no more."""
        if self._first is None and self._failure is None:
            try:
                self._first = next(self._requests, None)
            except Exception as error:
                self._failure = error
        return self._first

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def prefetch(self) -> None:
        """Read the next request now, while there is time."""
        self.first()

    def take(self) -> None:
        self._first = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    token_ids: generated tokens up to the first EOS or stop string, that one included (whole canvas if there is none).
    canvas_token_ids: every opened position, behind the EOS too; positions never filled hold the mask id.
    num_canvas_tokens: the filled ones among them: the published way of counting.
    num_forwards: steps; one step is one forward pass whatever the number of branches.
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

    @property
    def num_effective_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_forward(self) -> float:
        """Effective TPF: tokens up to and including the first EOS or stop string, over forward steps."""
        return self.num_effective_tokens / self.num_forwards

    @property
    def canvas_tokens_per_forward(self) -> float:
        return self.num_canvas_tokens / self.num_forwards


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
