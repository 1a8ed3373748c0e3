"""The contract between the scheduler and the hardware. `common.platforms` picks the engine."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from common.config import DecodeConfig
from common.decoding.orders import DropWeights, Order, ReadWeights, ResumeMemory, Tag, TakeMemory
from common.decoding.plan import Int, Logprobs, Predictions, StepPlan
from common.decoding.relay import Relay
from common.errors import ConfigError


class Room(NamedTuple):
    """The positions and blocks that a request needs."""

    prompt_length: int
    decode: DecodeConfig

    @property
    def num_positions(self) -> int:
        """Positions of the prompt and of all blocks that may be opened after it; blocks counted from position 0 are
        whole."""
        length = self.prompt_length + self.decode.max_new_tokens
        if not self.decode.strategy.is_from_zero:
            return length
        return -(-length // self.decode.block_size) * self.decode.block_size

    @property
    def block_start(self) -> int:
        """Start of the block that holds the first position after the prompt. Where blocks are counted from position 0
        it also holds the prompt's remainder."""
        size = self.decode.block_size
        return self.prompt_length // size * size if self.decode.strategy.is_from_zero else self.prompt_length

    def num_blocks(self, end: int) -> int:
        """Return how many blocks hold the positions from the prompt's end up to `end`."""
        return -(-(end - self.block_start) // self.decode.block_size) if end > self.prompt_length else 0

    def longest_prompt(self, max_model_len: int) -> int:
        """Return the tokens of the longest prompt whose canvas still fits; below 1 where none does."""
        size = self.decode.block_size if self.decode.strategy.is_from_zero else 1
        return max_model_len // size * size - self.decode.max_new_tokens


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold: requests at once, and positions a request (prompt and canvas together).

    vocab_size: token ids that the model's embedding has; None: not known.
    routing_block: positions that the model routes together, counted from 0, so that rows are made of whole ones; 0: it
        routes each for itself.
    gives_logprobs: the engine is a `GivesLogprobs`.
    """

    num_slots: int
    max_model_len: int
    vocab_size: int | None = field(default=None, kw_only=True)
    routing_block: int = field(default=0, kw_only=True)
    gives_logprobs: bool = field(default=False, kw_only=True)

    def can_hold(self, rooms: Sequence[Room]) -> bool:
        """Return whether such requests can be decoded at once. Every rank of a replica gets the same answer.

        Slots always fit; an engine whose requests share memory of another kind overrides this.
        """
        return True

    def num_spare(self, rooms: Sequence[Room]) -> int:
        """Return how many pages may hold what nobody uses (`Prefixes`) beside such requests."""
        return 0

    def why_refused(self, decode: DecodeConfig) -> str | None:
        """Return why a request cannot be decoded by these settings, in one sentence; None if it can."""
        return why_not_routed(decode, self.routing_block)


def why_not_routed(decode: DecodeConfig, routing_block: int) -> str | None:
    """Return why rows of these settings would not be made of whole routing blocks; None if they are."""
    if not routing_block or (decode.strategy.is_from_zero and decode.block_size % routing_block == 0):
        return None
    return (
        f"the model chooses experts for blocks of {routing_block} positions together, and block_size "
        f"{decode.block_size} would cut them: set it to a multiple"
    )


class PrefixRoot(NamedTuple):
    """What prompts must have in common before their tokens are compared. block_size: KV depends on tokens up to the end
    of its block; pages hold whole ones. salt: the requests' `cache_salt`. is_exact: KV depends on nothing else."""

    block_size: int
    salt: str = ""
    is_exact: bool = True


class Prefixes(Protocol):
    """KV that requests share: that of the pages that their prompts begin with alike.

    Called between passes, and on every rank of a replica alike, which then answer alike.
    """

    def match(self, prompt: Sequence[int], root: PrefixRoot) -> int:
        """Return how many of the prompt's first positions have KV: whole pages, never all of its whole blocks."""

    def is_coming(self, prompt: Sequence[int], root: PrefixRoot) -> bool:
        """Return whether a request that is being decoded will leave half or more of the KV that is missing."""

    def claim(self, slot: int, prompt: Sequence[int], root: PrefixRoot | None, num_spare: int) -> int:
        """Have a request begin in a free slot with what `match` finds; return how many positions that is.

        root: None: it shares nothing. num_spare: pages that may hold unused KV; what was used longest ago goes first.
        """

    def end(self, slot: int, is_sound: bool = True) -> None:
        """End the slot's request. What it has made final stays for others; if it is not sound, no later request finds
        what it has used."""

    def end_all(self) -> None:
        """End the requests that an earlier scheduler has left."""

    def forget(self) -> None:
        """Forget all KV: no later request finds what is there now."""


def prefixes_of(engine: Engine) -> Prefixes | None:
    """Return what the engine's requests share; None if they share nothing."""
    return getattr(engine, "prefixes", None)


class PassCosts(NamedTuple):
    """Measured seconds of forward passes, and of the scheduler between them.

    tokens: of a whole pass, all branch ranks together, ascending. seconds: what such passes take. host_of_one,
    host_of_more: seconds that the scheduler takes for one request, and for each further one.
    """

    tokens: Sequence[int]
    seconds: Sequence[float]
    host_of_one: float = 0.0
    host_of_more: float = 0.0

    def at(self, tokens: float) -> float:
        """Return the seconds of a pass of so many tokens: linear between measurements, extrapolated beyond the last."""
        after = min(max(bisect(self.tokens, tokens), 1), len(self.tokens) - 1)
        low, high = self.tokens[after - 1], self.tokens[after]
        slope = (self.seconds[after] - self.seconds[after - 1]) / (high - low)
        return self.seconds[after - 1] + max(tokens - low, 0.0) * max(slope, 0.0)

    def host_s(self, num_requests: int) -> float:
        """Return seconds of the scheduler between two passes of so many requests."""
        return self.host_of_one + (num_requests - 1) * self.host_of_more


class Place(Protocol):
    """This process's ranks in the run's mesh (`common.processes.Mesh`)."""

    @property
    def rank(self) -> int: ...

    @property
    def dp_rank(self) -> int: ...

    @property
    def dp_size(self) -> int: ...

    @property
    def bp_size(self) -> int: ...

    @property
    def tp_size(self) -> int: ...

    @property
    def is_leader(self) -> bool:
        """The one rank of its replica that writes results."""

    @property
    def relay(self) -> Relay | None:
        """The relay to the other ranks of the replica; None on a single rank."""


class Engine(Protocol):
    """Runs one forward pass a step for all rows of a plan. Every rank of a replica calls it with the same arguments."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def mesh(self) -> Place: ...

    def forward(self, plan: StepPlan) -> Predictions:
        """Compute every row once. Pre-writes the window's KV; the committed KV is unchanged.

        Raises EngineError naming rank and step on out of memory, a dead peer or a collective's time-out.
        """

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        """Make the KV of `plan.commits` final, taken from the winner's row ([requests of the step], global rows)."""

    def measure_passes(self, decode: DecodeConfig) -> PassCosts | None:
        """Return what passes take by their number of tokens; None if this engine does not measure them.

        Every rank of a replica calls it, before the first step, and gets the same.
        """

    def describe(self) -> dict[str, Any]:
        """Return the environment fingerprint: device, driver or CANN, torch, mesh, memory."""

    def close(self) -> None:
        """Leave the process groups and free device memory."""


class QueuesForwards(Protocol):
    """An engine whose passes run while the host does something else: `forward` in two calls."""

    def launch(self, plan: StepPlan) -> None: ...

    def receive(self) -> Predictions:
        """Wait for the pass launched last and return its predictions."""


class GivesLogprobs(Protocol):
    """An engine that tells of the pass received last more than its predictions, until the next is launched."""

    def logprobs(self, plan: StepPlan, entry_F: Int, token_F: Int, num_top: int) -> Logprobs:
        """Return the log probability of a token at each of these entries, all of them read, and those of the `num_top`
        most probable tokens there.

        plan: of that pass. Every rank of a replica calls it with the same arguments. Raises EngineError as `forward`.
        """


def start_forward(engine: Engine, plan: StepPlan) -> Callable[[], Predictions]:
    """Launch the pass and return a function that waits for it. If the engine cannot launch ahead, that function
    computes it."""
    if not hasattr(engine, "launch"):  # isinstance of a protocol would take some 5 us of every step
        return partial(engine.forward, plan)
    queueing = cast(QueuesForwards, engine)
    queueing.launch(plan)
    return queueing.receive


class TakesOrders(Protocol):
    """An engine whose weights can be replaced, and whose memory can be given back.

    weight_version: of the weights in force. released: what of its memory has been given back.
    """

    weight_version: str
    released: frozenset[Tag]

    def obey(self, order: Order) -> None:
        """Carry an order out while nothing is decoded. Raises ConfigError, with nothing changed, where it cannot be."""


def taking_orders(engine: Engine) -> TakesOrders:
    """Return the engine as one that takes orders. Raises ConfigError if it takes none."""
    if not hasattr(engine, "obey"):
        raise ConfigError("this engine keeps its weights and its memory: start it again instead")
    return cast(TakesOrders, engine)


def carry_out(engine: Engine, order: Order) -> str | None:
    """Carry an order out on this rank, as all ranks of its replica do. Return why one of them cannot, the same on all,
    with nothing changed on any; None once all have."""
    parts = (TakeMemory(order.tags), order) if isinstance(order, ResumeMemory) else (order,)
    for part in parts:
        problem = None
        try:
            taking_orders(engine).obey(part)
        except ConfigError as error:
            problem = str(error)
        relay = engine.mesh.relay
        problems = [problem] if relay is None else relay.gather(problem)
        found = next((one for one in problems if one is not None), None)
        if found is not None:
            if problem is None and isinstance(part, (ReadWeights, TakeMemory)):
                taking_orders(engine).obey(DropWeights())
            return found
    return None
