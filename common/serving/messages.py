"""What the front end and the engine's process tell each other. Both are one user's processes of one version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from common.config import DecodeConfig, RunConfig
from common.decoding import FIRST_VERSION, Completion, GenerationRequest, Order, StepRecord, TokenLogprob

if TYPE_CHECKING:
    from common.generate import Generator

TAKEN_ID = (
    "request_id: a call of this id is still being answered; give each call an id of its own, here or in the header "
    "X-Request-Id"
)
TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WINDOW_BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Add(NamedTuple):
    """A new request. is_watched: its step records are wanted."""

    request: GenerationRequest
    is_watched: bool = False


class Abort(NamedTuple):
    id: str


class AbortCall(NamedTuple):
    """Abort all requests of a call, whichever front end took it; None: of all calls. number: of the question, which
    `Aborted` answers."""

    number: int
    call_id: str | None


class Pause(NamedTuple):
    """Begin no request. mode: those that have begun are aborted, as are those that wait; or end as ever (`wait`); or
    stand still between two passes (`in_place`)."""

    mode: Literal["abort", "wait", "in_place"] = "abort"


class Continue(NamedTuple):
    """End the pause."""


class Ask(NamedTuple):
    """Have the engine do something beside answers. key: of the call that asks, which `Obeyed` answers. is_aborting: all
    open requests are aborted, instead of waiting for their ends."""

    key: str
    what: Order | Pause | Continue
    is_aborting: bool = False


class Obeyed(NamedTuple):
    """What was asked has been done. problem: why it cannot be; status: of HTTP for that."""

    key: str
    problem: str | None = None
    status: int = 400
    weight_version: str = FIRST_VERSION


class Over(NamedTuple):
    """Notice that this front end will send nothing more; the engine may stop."""


class Begin(NamedTuple):
    """The first message to the front end. port: the one that is listened on. keys: digests of the API keys."""

    run: RunConfig
    model_names: tuple[str, ...]
    port: int
    keys: tuple[bytes, ...]
    num_replicas: int = 1


class Hello(NamedTuple):
    """The first message of a replica that comes to a front end by itself; and to who starts replicas, that it takes
    requests."""

    replica: int


class Ready(NamedTuple):
    """The model is loaded. decode: the run's settings, with `auto` as a number."""

    decode: DecodeConfig
    num_slots: int
    max_model_len: int
    vocab_size: int

    @classmethod
    def of(cls, generator: Generator) -> Ready:
        capacity = generator.engine.capacity
        vocab_size = capacity.vocab_size or generator.model_config.vocab_size
        return cls(generator.run.decode, capacity.num_slots, capacity.max_model_len, vocab_size)


class Aborted(NamedTuple):
    """The answer to an abort: how many requests of a call are being aborted."""

    number: int
    num_requests: int


class Accepted(NamedTuple):
    id: str


class Rejected(NamedTuple):
    """A request that ends without an answer. status: of HTTP, the client's fault or this side's."""

    id: str
    reason: str
    status: int = 400


class Tokens(NamedTuple):
    """What became final in a pass. logprobs: of each token, where they were asked for."""

    id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Passed(NamedTuple):
    """A pass of a watched request."""

    record: StepRecord


class Ended(NamedTuple):
    """The end of a request. token_ids, logprobs: those that no `Tokens` has sent. The counts and step_map are of the
    whole request, as in `Completion`.

    weight_version: of the weights that computed it. queue_s, prefill_s, total_s: seconds of waiting, from then to the
    end of the first pass, and from then to the end.
    """

    id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_tokens: int = 0
    num_forwards: int = 0
    num_lookahead_wins: int = 0
    num_forced_fills: int = 0
    tokens_per_step: tuple[int, ...] = ()
    queue_s: float = 0.0
    prefill_s: float = 0.0
    total_s: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    step_map: tuple[int, ...] = ()
    weight_version: str = FIRST_VERSION
    num_cached_tokens: int = 0
    option_logprobs: tuple[float, ...] = ()

    @classmethod
    def of(cls, result: Completion) -> Ended:
        """Make the message of a completion none of whose tokens were sent before."""
        return cls(
            id=result.id,
            token_ids=result.token_ids,
            finish_reason=result.finish_reason,
            num_tokens=len(result.token_ids),
            num_forwards=result.num_forwards,
            num_lookahead_wins=result.num_lookahead_wins,
            num_forced_fills=result.num_forced_fills,
            tokens_per_step=result.tokens_per_step,
            prefill_s=result.first_step_s,
            total_s=result.total_s,
            logprobs=result.logprobs,
            step_map=result.step_map,
            num_cached_tokens=result.num_cached_tokens,
            option_logprobs=result.option_logprobs,
        )


class Failed(NamedTuple):
    """The engine has failed, or its process ends before the answer does. status: of HTTP."""

    sentence: str
    status: int = 500


@dataclass(slots=True)
class Counts:
    """The engine's numbers since its start; `num_*_now` and kv_usage are those of the moment.

    forwards: passes by phase. wins: steps by the branch that won. ways: steps of requests by the way of the run's pace.
    Histograms are counts by bucket, the last without an end, beside the sum of what was counted (TOKEN_BUCKETS,
    WINDOW_BUCKETS).
    """

    num_running_now: int = 0
    num_waiting_now: int = 0
    weight_version: str = FIRST_VERSION
    num_slots: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    forwards: dict[str, int] = field(default_factory=dict)
    wins: dict[str, int] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    num_rows: int = 0
    num_committed: int = 0
    num_blocks: int = 0
    graph_hits: int = 0
    graph_misses: int = 0
    tokens_histogram: list[int] = field(default_factory=list)
    tokens_sum: int = 0
    windows_histogram: list[int] = field(default_factory=list)
    windows_sum: int = 0


def call_names(request_id: str) -> tuple[str, str]:
    """Return what the call of this request can be aborted by: its answer's id, and that without the route's prefix."""
    own = request_id.rpartition("-")[0]
    return own, own.partition("-")[2]
