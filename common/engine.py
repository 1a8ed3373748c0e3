"""The one boundary between the scheduler and the hardware, and the table that picks what stands behind it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from common.plan import Int, Predictions, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from common.config import DecodeConfig, DeviceProfile, RunConfig
    from common.launch import Mesh

ENGINES = {"lopa_cuda": "lopa_cuda.assemble", "lopa_ascend": "lopa_ascend.assemble"}


class EngineError(RuntimeError):
    """The hardware side failed; the message names rank, step and what to do."""


class MissingCapability(EngineError):
    """This machine or build cannot do what the profile asks; the message says what to change."""


class Stopwatch:
    """Seconds between `start` and `stop`, summed until `reset`; what an engine notes of a step's passes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._started

    def reset(self) -> None:
        self.seconds = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold: requests at once, and positions a request (prompt and canvas together)."""

    num_slots: int
    max_model_len: int

    def can_hold(self, prompt_lengths: Sequence[int], decode: DecodeConfig) -> bool:
        """Whether requests with these prompts can be decoded at once. Every rank of a replica gets the same answer.

        Slots always fit; an engine whose requests share memory of another kind overrides this.
        """
        return True


class Engine(Protocol):
    """Runs one forward pass a step for all rows of a plan. Every rank of a replica calls it with the same arguments."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def mesh(self) -> Mesh: ...

    def forward(self, plan: StepPlan) -> Predictions:
        """Compute every row once. Pre-writes the window's KV; the committed KV is unchanged.

        Raises EngineError naming rank and step on out of memory, a dead peer or a collective's time-out.
        """

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        """Make the KV of `plan.commits` final, taken from the winner's row ([requests of the step], global rows)."""

    def describe(self) -> dict[str, Any]:
        """The environment fingerprint: device, driver or CANN, torch, mesh, memory."""

    def close(self) -> None:
        """Leave the process groups and free device memory."""


class QueuesForwards(Protocol):
    """An engine whose passes run while the host does something else: `forward` in two calls."""

    def launch(self, plan: StepPlan) -> None: ...

    def receive(self) -> Predictions:
        """Of the pass launched last."""


@contextmanager
def allocating(what: str, num_bytes: int) -> Iterator[None]:
    """EngineError where so much memory cannot be had, on a CPU too; `what` names the requests and their length."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError) as error:  # of torch, by how much too large it is
        raise EngineError(
            f"{what} needs {num_bytes / 2**30:.1f} GiB, which cannot be allocated: lower max_num_requests or "
            "max_model_len"
        ) from error


def start_forward(engine: Engine, plan: StepPlan) -> Callable[[], Predictions]:
    """Begin the pass, and return what waits for it. Where an engine cannot queue, that is what computes it."""
    if not hasattr(engine, "launch"):  # isinstance of a protocol would take some 5 us of every step
        return partial(engine.forward, plan)
    queueing = cast(QueuesForwards, engine)
    queueing.launch(plan)
    return queueing.receive


def build_engine(profile: DeviceProfile, run: RunConfig) -> Engine:
    """The engine that the profile names, with the run's model loaded. Raises MissingCapability or ConfigError."""
    from common.launch import resolve_engine

    module = import_module(ENGINES[resolve_engine(profile)])
    engine: Engine = module.assemble(profile, run)
    return engine
