"""How a step runs on a device: one forward pass in two halves.

plan -> this rank's rows, laid out in buffers -> layers -> the states that the scheduler reads -> head, statistics,
gather over bp -> host. Each half is captured once a size and replayed, or runs as it is (graphs.runner). `launch` only
queues work, the head while the layers run. `receive` is the one place where the host waits for the device.

An engine package subclasses `Passes` with what depends on its kernels and its KV memory: `_lay_out`, `_launch_head` and
`_prepare_commits` on the host, `_run_layers` and `_run_head` on the device, and the buffers of both.
"""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.decoding import Int, PredictionOrder, Predictions, Sampling, StepPlan
from common.model import NUM_SAMPLING_FIELDS, Decoder, SamplingRows, sampling_fields
from common.runtime.collectives import Collectives
from common.runtime.floors import Clock
from common.runtime.times import PassTimes, Stopwatch
from common.runtime.upload import Upload
from common.runtime.waiting import DeviceEvent
from graphs.runner import Capture, Entry, GraphRunner, capture_costs

logger = logging.getLogger(__name__)

_GATHERS = 10  # timed at once


class LayersShape(Protocol):
    """What every engine's key of the layers tells."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the layers run at, padding included."""

    @property
    def is_captured(self) -> bool: ...


class ReadsKey(NamedTuple):
    """The shape of a pass through the head, and what it does with the logits."""

    num_reads: int
    sampling: Sampling
    is_captured: bool


class Passes(ABC):
    """A model's forward passes on this rank.

    capture: None runs every pass at its own size. wait: returns once the device has come past an event, or raises
    EngineError. most: how many shapes of layers and of heads are captured; None: any number.

    layers, head: the two halves. runners: all that is captured, to be released with the engine. key: the shape of the
    layers that were launched last. clock: the stopwatch of this kind of device.
    """

    clock: Clock
    key: LayersShape

    def __init__(
        self, model: Decoder, collectives: Collectives, device: torch.device, capture: Capture | None,
        wait: Callable[[DeviceEvent | None], None], most: tuple[int | None, int | None] = (None, None),
    ) -> None:  # fmt: skip
        self.model = model
        self.device = device
        self.busy = Stopwatch()
        is_cpu = device.type == "cpu"
        self.times = PassTimes(None if is_cpu else partial(self._new_event, is_timed=True))
        self._done = None if is_cpu else self._new_event(is_timed=False)
        self._wait = wait
        self._collectives = collectives
        self._bp_rank = collectives.mesh.bp_rank
        self._capture = capture
        self._predicted_PM3 = np.zeros((0, 0, 3), dtype=np.float32)  # on the host, of the last launch
        self.layers = GraphRunner("layers", self._step_buffers, self._run_layers, capture, most[0])
        self.head = GraphRunner("head", self._read_buffers, self._run_head, capture, most[1])
        self.runners: list[GraphRunner[Any, Any]] = [self.layers, self.head]

    def launch(self, plan: StepPlan) -> PredictionOrder:
        """Queue the pass over all rows of the plan; return where its predictions belong. Passes share buffers and KV
        memory: receive one, and commit it, before the next is launched."""
        layers = self._lay_out(plan)
        self.times.mark(0)
        self.busy.start()
        layers.run()
        if self.key.is_captured:
            self.busy.start()  # the device begins once it has the whole graph
        self.times.mark(1)
        entries_of, self._predicted_PM3 = self._launch_head(plan)
        self.times.mark(2)
        if self._done is not None:
            self._done.record()
        order = PredictionOrder(plan.num_tokens, entries_of, self._predicted_PM3.shape[1])
        self._prepare_commits(plan)
        return order

    def receive(self, order: PredictionOrder) -> Predictions:
        """Wait for the pass that was launched last."""
        self._wait(self._done)
        self.busy.stop()
        return order.predictions(self._predicted_PM3)

    def run(self, plan: StepPlan) -> Predictions:
        return self.receive(self.launch(plan))

    @contextmanager
    def capturing_ahead(self) -> Iterator[None]:
        """Around the captures before the first request, which no step then waits for; says what they took.

        All ranks capture the same shapes in the same order, since passes hold collectives, and the largest first:
        graphs share one pool of scratch memory, which then never has to grow.
        """
        started = time.perf_counter()
        yield
        # A collector pause would fall into some step; what exists now lives as long as the process.
        gc.collect()
        gc.freeze()
        costs = capture_costs(self.layers, self.head)
        logger.info(
            "captured %d shapes in %.1f s: graphs hold %.2f GiB",
            costs["graphs"], time.perf_counter() - started, costs["capture_bytes"] / 2**30,
        )  # fmt: skip

    @abstractmethod
    def _new_event(self, *, is_timed: bool) -> Any:
        """An event of this kind of device."""

    @abstractmethod
    def _lay_out(self, plan: StepPlan) -> Entry[Any]:
        """The layers at the plan's size, with this rank's rows in their buffers and in the KV memory. Sets `key`."""

    @abstractmethod
    def _launch_head(self, plan: StepPlan) -> tuple[Sequence[Int], npt.NDArray[np.float32]]:
        """Queue the head: the plan's entries that each branch rank reads, and the host memory [bp, M, 3] in which their
        token, probability and confidence come."""

    @abstractmethod
    def _prepare_commits(self, plan: StepPlan) -> None:
        """Prepare what the plan commits, while the device computes."""

    @abstractmethod
    def _step_buffers(self, key: Any) -> Any:
        """Buffers of the layers, filled with something that `_run_layers` can run on."""

    @abstractmethod
    def _run_layers(self, key: Any, buffers: Any) -> None: ...

    @abstractmethod
    def _read_buffers(self, key: ReadsKey) -> ReadBuffers:
        """Buffers of the head, filled with something that `_run_head` can run on."""

    @abstractmethod
    def _run_head(self, key: ReadsKey, buffers: Any) -> None: ...

    # What benches ask.

    def gather_ms(self, num_reads: int) -> float:
        """Milliseconds of the gather over bp alone, captured where passes are."""
        if self._collectives.mesh.bp_group is None:
            return 0.0

        def gather(_: int, predicted_M3: torch.Tensor) -> None:
            for _ in range(_GATHERS):
                self._collectives.bp_stack(predicted_M3)

        gathers = GraphRunner("gather", lambda key: torch.zeros((key, 3), device=self.device), gather, self._capture)
        return self.clock(gathers.entry(num_reads).run, self.device) / _GATHERS * 1e3

    def length_updates_ms(self) -> dict[str, float]:
        """`common.bench.steps.Measurable` says what; nothing where replays read their lengths on the device."""
        return {}

    def memory(self) -> dict[str, float]:
        """Peak bytes of this process on the device, and what capture cost."""
        peak = 0
        if self.device.type != "cpu":
            peak = torch.get_device_module(self.device).max_memory_allocated(self.device)
        return {"peak_bytes": float(peak), **capture_costs(self.layers, self.head)}

    def num_experts_hit(self, plan: StepPlan) -> float | None:
        """Experts of a layer that a pass over all rows reads, the mean over layers; None: a model without, or not
        counted here."""
        return None


class ReadBuffers:
    """How the states are drawn that go through the head, and what comes of them, of all branch ranks, on the host.

    sampling_rows: as the head takes them; None where every read takes its most probable token.
    """

    def __init__(self, key: ReadsKey, device: torch.device, num_ranks: int) -> None:
        is_sampled = key.sampling.is_sampled
        self._sampling = Upload((NUM_SAMPLING_FIELDS if is_sampled else 0, key.num_reads), device)
        self._predicted = torch.zeros((num_ranks, key.num_reads, 3), pin_memory=device.type != "cpu")
        self.predicted_PM3 = self._predicted.numpy()
        self.sampling_rows = SamplingRows.of(self._sampling.device) if is_sampled else None

    def fill_sampling(self, plan: StepPlan, entry_M: Int) -> None:
        """Write how the predictions of these entries of the plan are drawn, where any is."""
        if plan.sampling_3R is None:
            return
        row_M = plan.first_R.searchsorted(entry_M, side="right") - 1
        self._sampling.host[:] = sampling_fields(
            plan.sampling_3R[:, row_M], plan.noise_key_R[row_M], plan.step_R[row_M], plan.position_T[entry_M] + 1,
            self._sampling.host.shape[1],
        )  # fmt: skip

    def receive(self, predicted_PM3: torch.Tensor) -> None:
        """Copy to the host; it is there once the device has come this far."""
        self._predicted.copy_(predicted_PM3, non_blocking=True)
