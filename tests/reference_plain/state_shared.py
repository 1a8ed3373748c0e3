"""What is remembered of a request while it is decoded, whoever decodes it, and what a step of it looked like."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from common.decoding.plan import Bool, Int, Predictions, Sampling, Score, StepPlan
from common.decoding.request import Completion, GenerationRequest
from common.errors import first_line
from reference_plain.rules import Rules, StopSearch

AnswerT = TypeVar("AnswerT")


@dataclass(eq=False)
class Admission:
    """A request that has got a slot.

    num_reused: positions of its prompt whose KV is there already. failures: of all requests that the step under way
    has to end, by id: why.
    """

    request: GenerationRequest
    rules: Rules
    slot: int
    noise_key: int
    num_reused: int
    admitted_at: float
    failures: dict[str, str] = field(default_factory=dict)

    def asked(self, decide: Callable[..., AnswerT], *given: object) -> AnswerT | None:
        """What a policy or a stop finder says of this request. Either may be anybody's: one that raises says None, and
        ends this request with the step; the others go on."""
        try:
            return decide(*given)
        except Exception as error:
            is_sentence = isinstance(error, ValueError)
            reason = first_line(error) if is_sentence else f"{type(error).__name__}: {first_line(error)}"
            self.failures[self.request.id] = f"decoding this request failed ({reason})"
            return None


@dataclass(slots=True, eq=False, kw_only=True)
class DecodingRequest(Admission):
    """A request being decoded.

    stop_search: of settings with stop strings, once a token is final.
    num_forced_fills: as in `Completion`.
    steps: tokens, rows, winner and window of each, as in `Completion`.
    """

    stop_search: StopSearch | None = None
    num_forced_fills: int = 0
    first_step_s: float = 0.0
    steps: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def token_S(self) -> Int:
        """By absolute position: the prompt, the anchor's tokens, and masks."""
        raise NotImplementedError

    @property
    def is_masked_S(self) -> Bool:
        raise NotImplementedError


class Requests(Protocol):
    """Decodes all requests of a replica together, a step at a time.

    observer: None: nobody looks.
    """

    observer: Observer | None

    @property
    def active(self) -> list[DecodingRequest]:
        """In the order in which a step's rows hold them."""

    def add(self, admission: Admission) -> None: ...

    def drop(self, request_id: str, now: float) -> tuple[DecodingRequest, Completion] | None:
        """End a request between two steps with what it has; None: it is not being decoded."""

    def num_prompt_tokens(self) -> int:
        """In the coming step, of prompts that are cut and have begun."""

    def plan_step(self, sampling: Sampling) -> StepPlan: ...

    def prepare(self) -> None:
        """Behind plan_step: what select_winners needs beside predictions, and otherwise makes itself."""

    def select_winners(self, predictions: Predictions) -> Int:
        """Rows of the step planned last."""

    def scores(self) -> Score:
        """C(B) of the rows that select_winners has looked at."""

    def advance(self, winner_row_of_request: Int, now: float) -> list[tuple[DecodingRequest, Completion]]:
        """Behind select_winners; those that have ended."""

    def newly_final(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of requests that go on: tokens that can no longer change and were not told of by an earlier call."""


class Observer(NamedTuple):
    """see: called with a StepRecord of every step of the requests of these ids; None: of all."""

    see: Callable[[StepRecord], None]
    ids: Container[str] | None = None

    def wants(self, decoding: DecodingRequest) -> bool:
        """A step that has failed is no step."""
        request_id = decoding.request.id
        return (self.ids is None or request_id in self.ids) and request_id not in decoding.failures


class Candidate(NamedTuple):
    """What a step predicts at a position. current: the token that stands there; None: a mask."""

    token: int
    probability: float
    confidence: float
    current: int | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What happened to a request in one step, for traces: branches in row order, lookaheads first and the anchor
    last.

    start: the window's first position. Confidences are those of `sampling_strategy`. Only of requests decoded one after
    another: candidates: what the winner predicted at each position that the step could fill or edit; num_sure: masks
    above `skip_threshold`, of each branch.
    """

    request_id: str
    start: int
    commit_length: int
    window_lengths: list[int]
    branch_scores: list[float]
    winner_is_anchor: bool
    filled: dict[int, int]  # position -> token, the winner's own fill
    filled_confidence: list[float]  # of these, in their order
    lookahead: list[tuple[int, int, float]]  # position, token, confidence: spawned for the next step
    candidates: dict[int, Candidate] = field(default_factory=dict, compare=False, repr=False)
    num_sure: list[int] = field(default_factory=list, compare=False, repr=False)
    edited: dict[int, int] = field(default_factory=dict)  # position -> new token
    is_tentative: bool = False  # what was committed is written over later
