"""A request's state beside its tables, and the records of its steps that observers see."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from common.decoding.request import GenerationRequest
from common.decoding.scheduling.held import Held
from common.decoding.scheduling.rules import Rules, StopSearch
from common.errors import first_line

AnswerT = TypeVar("AnswerT")


@dataclass(slots=True, eq=False)
class DecodingRequest:
    """A request that has a slot.

    num_reused: positions of its prompt whose KV is there already. failures: why the step under way has to end requests,
    by the ids of all such requests. stop_search: None without stop strings, and until a token is final. held: None
    unless the answer is held to a format.
    """

    request: GenerationRequest
    rules: Rules
    slot: int
    noise_key: int
    num_reused: int
    admitted_at: float
    failures: dict[str, str] = field(default_factory=dict)
    first_step_s: float = 0.0
    stop_search: StopSearch | None = None
    held: Held | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    def asked(self, decide: Callable[..., AnswerT], *given: object) -> AnswerT | None:
        """Return what a policy, a stop search or a format answers for this request. If it raises, return None: this
        request ends with the step, and the others go on."""
        try:
            return decide(*given)
        except Exception as error:
            is_sentence = isinstance(error, ValueError)
            reason = first_line(error) if is_sentence else f"{type(error).__name__}: {first_line(error)}"
            self.failures[self.request.id] = f"decoding this request failed ({reason})"
            return None


class Observer(NamedTuple):
    """see: called with a StepRecord of every step of the requests of these ids; None: of all."""

    see: Callable[[StepRecord], None]
    ids: Container[str] | None = None

    def wants(self, decoding: DecodingRequest) -> bool:
        """Return whether the observer sees the request's step; it sees none that has failed."""
        request_id = decoding.request.id
        return (self.ids is None or request_id in self.ids) and request_id not in decoding.failures


class Branch(NamedTuple):
    """A branch of a step: the anchor and some more tokens. fills: (position, token) of each, positions absolute; of the
    anchor none. creation_confidence: of the prediction that made the branch. origin: the spawn rule that did."""

    fills: tuple[tuple[int, int], ...] = ()
    creation_confidence: float = 1.0
    origin: str = ""


class Candidate(NamedTuple):
    """What a step predicts at a position. current: the token that stands there; None: a mask."""

    token: int
    probability: float
    confidence: float
    current: int | None = None


class Revision(NamedTuple):
    """What a step did to a block that is revised (`strategies.revising`), positions as the pass saw them.

    quota: masks to fill at least; None: all. is_final: it was the last that might change the block. num_post: passes
    without a mask of the first ones. runners_up: positions whose candidate is not the most probable token. replaced:
    what was written there instead of the candidate. escaped: positions of these where the block would have repeated.
    deleted, inserted: where a token was deleted, or a mask inserted before it. after: the block after the step. masks:
    its positions without a token. first: those whose token was a mask when the block was opened, or stands for such.
    """

    quota: int | None
    is_final: bool
    num_post: int
    runners_up: tuple[int, ...]
    replaced: dict[int, int]
    escaped: tuple[int, ...]
    deleted: tuple[int, ...]
    inserted: tuple[int, ...]
    after: tuple[int, ...]
    masks: tuple[int, ...]
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A request's step, for traces: branches in row order, lookaheads first and the anchor last.

    start: the window's first position. Confidences are those of `sampling_strategy`. lookahead: the branches spawned
    for the next step, without the anchor. candidates: what the winner predicted at each position that the step could
    fill or edit. num_sure: masks above `skip_threshold`, of each branch.
    """

    request_id: str
    start: int
    commit_length: int
    window_lengths: list[int]
    branch_scores: list[float]
    winner_is_anchor: bool
    filled: dict[int, int]  # position -> token, the winner's own fill
    filled_confidence: list[float]  # of these, in their order
    lookahead: list[Branch]
    candidates: dict[int, Candidate] = field(default_factory=dict, compare=False, repr=False)
    num_sure: list[int] = field(default_factory=list, compare=False, repr=False)
    edited: dict[int, int] = field(default_factory=dict)  # position -> new token
    is_tentative: bool = False  # what was committed is written over later
    revision: Revision | None = None
