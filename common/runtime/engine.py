"""How a step runs on a device: one forward pass in two halves, and its commit.

plan -> this rank's rows, laid out in buffers -> layers -> the states that the scheduler reads -> head, statistics,
gather over bp -> host. Each half is captured once a size and replayed, or runs as it is (graphs.runner). `launch` only
queues work, the head while the layers run. `receive` is the one place where the host waits for the device.

An engine package subclasses `DeviceEngine` with what depends on its kernels and its KV memory: `_lay_out`,
`_launch_head` and `_prepare_commits` on the host, `_run_layers` and `_run_head` on the device, and buffers of both.
"""

from __future__ import annotations

import gc
import logging
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.config import DecodeConfig
from common.decoding import Capacity, Int, Logprobs, Order, PassCosts, PredictionOrder, Predictions, StepPlan, Tag
from common.errors import EngineError
from common.model import Decoder
from common.processes import close_mesh, keep_until_end
from common.runtime.classes.head import ClassHead, Reduce
from common.runtime.classes.tiles import class_statistics
from common.runtime.collectives import Collectives
from common.runtime.floors import Clock, measure_floors
from common.runtime.logprobs import Shares, told_logprobs
from common.runtime.paging.prefixes import PrefixCache
from common.runtime.reads import ReadBuffers, ReadsKey
from common.runtime.times import PassTimes, Stopwatch
from common.runtime.waiting import DeviceEvent, explained
from common.runtime.weights.holdings import Holdings
from graphs.runner import Agree, Capture, Entry, GraphRunner, capture_costs, graph_uses

logger = logging.getLogger(__name__)

_GATHERS = 10  # timed at once


class LayersShape(Protocol):
    """The key of a pass through the layers."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the layers run at, padding included."""

    @property
    def is_captured(self) -> bool: ...


class KVMemory(Protocol):
    """The tensors of the KV cache."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """What can be given back and taken again."""


class Commits(Protocol):
    """Which KV is whose, and how it becomes final."""

    @property
    def prefixes(self) -> PrefixCache: ...

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        """See `common.decoding.Engine.commit`."""


class DeviceEngine(ABC):
    """`common.decoding.Engine` over one device a process, and what `common.bench` measures of it.

    capture: None runs every pass at its own size. wait: returns once the device has come past an event, or raises
    EngineError. details: more for `describe`. most: how many shapes of layers and of heads are captured; None: any
    number. agree: as GraphRunner's, of the layers and of the head.

    layers, head: the two halves. runners: all that is captured. key: the shape of the layers that were launched last.
    holdings: set once all is loaded.
    """

    name: str  # as profiles have it
    clock: Clock  # for this kind of device
    key: LayersShape
    holdings: Holdings

    def __init__(
        self, model: Decoder, cache: KVMemory, kv: Commits, capacity: Capacity, collectives: Collectives,
        device: torch.device, capture: Capture | None, wait: Callable[[DeviceEvent | None], None],
        details: dict[str, Any], most: tuple[int | None, int | None] = (None, None),
        agree: tuple[Agree, Agree] = (bool, bool), reduce_classes: Reduce = class_statistics,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.kv = model, cache, kv
        self.capacity, self.mesh, self.device = capacity, collectives.mesh, device
        self.num_steps = 0
        is_cpu = device.type == "cpu"
        self._busy, self._times = Stopwatch(), PassTimes(None if is_cpu else partial(self._new_event, is_timed=True))
        self._done = None if is_cpu else self._new_event(is_timed=False)
        self._wait = wait
        self._collectives = collectives
        self._classes = ClassHead(collectives, device, model.vocab_start, reduce_classes)
        self._bp_size, self._bp_rank = self.mesh.bp_size, self.mesh.bp_rank
        self._capture, self._agree_on_head = capture, agree[1]
        self._details = details
        self._under_way: PredictionOrder | None = None
        self._entries_of: Sequence[Int] = ()  # what each branch rank read in the last launch
        self._predicted_PM3 = np.zeros((0, 0, 3), dtype=np.float32)  # the last launch's, on the host
        self._has_failed = False
        self.layers = GraphRunner("layers", self._step_buffers, self._run_layers, capture, most[0], agree[0])
        self.head = GraphRunner("head", self._read_buffers, self._run_head, capture, most[1], agree[1])
        self.runners: list[GraphRunner[Any, Any]] = [self.layers, self.head]

    def forward(self, plan: StepPlan) -> Predictions:
        self.launch(plan)
        return self.receive()

    def launch(self, plan: StepPlan) -> None:
        """Queue the pass over all rows. Passes share buffers and KV memory: receive one, and commit it, before the next
        is launched."""
        if self._under_way is not None:
            self.receive()  # somebody stopped asking in the middle of a step
        try:
            self._under_way = self._launch(plan)
        except RuntimeError as error:
            raise self._failed(error) from error

    def receive(self) -> Predictions:
        order, self._under_way = self._under_way, None
        assert order is not None, "receive follows launch"
        try:
            predictions = self._receive(order)
        except RuntimeError as error:
            raise self._failed(error) from error
        self.num_steps += 1
        return predictions

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        assert self._under_way is None, "commit follows receive"
        try:
            self.kv.commit(plan, winner_row_of_request)
            self.prefixes.note(plan, winner_row_of_request)
        except RuntimeError as error:
            raise self._failed(error) from error

    @torch.no_grad()
    def logprobs(self, plan: StepPlan, entry_F: Int, token_F: Int, num_top: int) -> Logprobs:
        """See `common.decoding.GivesLogprobs`."""
        assert self._under_way is None, "logprobs follow receive"
        try:
            shares = Shares(plan.num_tokens, self._entries_of, entry_F, self._bp_rank)
            logits_MV = self._logits_of(plan, shares.place_M)
            return told_logprobs(
                shares, logits_MV, token_F, num_top, self.model.vocab_start, plan.sampling, self._collectives,
                self._finished, self._wait,
            )  # fmt: skip
        except RuntimeError as error:
            raise self._failed(error) from error

    def _finished(self) -> DeviceEvent | None:
        if self._done is not None:
            self._done.record()
        return self._done

    @property
    def prefixes(self) -> PrefixCache:
        return self.kv.prefixes

    @property
    def weight_version(self) -> str:
        return self.holdings.version

    @property
    def released(self) -> frozenset[Tag]:
        return self.holdings.released

    def obey(self, order: Order) -> None:
        """See `common.decoding.TakesOrders.obey`."""
        if self._under_way is not None:
            self.receive()  # somebody stopped asking in the middle of a step
        self.prefixes.forget()
        try:
            self.holdings.obey(order)
        except RuntimeError as error:
            raise self._failed(error) from error

    def forget_captures(self) -> None:
        """Free what is captured; it is captured anew where it is wanted."""
        for runner in self.runners:
            runner.release()

    def run(self, plan: StepPlan) -> Predictions:
        """A pass before the first step: no step is counted, and the device's errors come as they are."""
        return self._receive(self._launch(plan))

    def _launch(self, plan: StepPlan) -> PredictionOrder:
        """Queue both halves; return where the predictions belong."""
        layers = self._lay_out(plan)
        is_captured = self.key.is_captured
        self._times.mark(0)
        if not is_captured:
            self._busy.start()
        layers.run()
        if is_captured:
            self._busy.start()  # the device begins once it has the whole graph
        self._times.mark(1)
        self._entries_of, self._predicted_PM3 = self._launch_head(plan)
        if plan.automaton_of is not None:
            self._classes.launch(plan, self._entries_of, self._logits_for_formats(plan))
        self._times.mark(2)
        self._finished()
        order = PredictionOrder(plan.num_tokens, self._entries_of, *self._predicted_PM3.shape[1:])
        self._prepare_commits(plan)
        return order

    def _receive(self, order: PredictionOrder) -> Predictions:
        self._wait(self._done)
        self._busy.stop()
        predictions = order.predictions(self._predicted_PM3)
        return predictions._replace(classes=self._classes.receive()) if self._classes.is_under_way else predictions

    def _failed(self, error: RuntimeError) -> EngineError:
        """The error as users read it; after it the process has to end."""
        self._has_failed = True
        if self.mesh.world_size > 1 and self.device.type != "cpu":
            keep_until_end(self)  # a kernel may wait for a peer that never comes
        return explained(error, self.mesh.rank, self.num_steps)

    @abstractmethod
    def _new_event(self, *, is_timed: bool) -> Any:
        """An event of this kind of device."""

    @abstractmethod
    def _lay_out(self, plan: StepPlan) -> Entry[Any]:
        """The layers at the plan's size, with this rank's rows in their buffers and in the KV memory. Sets `key`."""

    @abstractmethod
    def _step_buffers(self, key: Any) -> Any:
        """Buffers of the layers, filled with something that `_run_layers` can run on."""

    @abstractmethod
    def _run_layers(self, key: Any, buffers: Any) -> None: ...

    @abstractmethod
    def _launch_head(self, plan: StepPlan) -> tuple[Sequence[Int], npt.NDArray[np.float32]]:
        """Queue the head: the plan's entries that each branch rank reads, and the host memory [bp, M, 3] in which their
        token, probability and confidence come."""

    @abstractmethod
    def _read_buffers(self, key: ReadsKey) -> ReadBuffers:
        """Buffers of the head, filled with something that `_run_head` can run on."""

    @abstractmethod
    def _run_head(self, key: ReadsKey, buffers: Any) -> None: ...

    @abstractmethod
    def _logits_of(self, plan: StepPlan, place_M: Int) -> torch.Tensor:
        """Logits [M, V] of this rank's shard of the vocabulary, as the pass of this
        plan has predicted from. place_M: among the entries that this rank reads; of a rank that reads none the first
        state that there is."""

    def _logits_for_formats(self, plan: StepPlan) -> Callable[[Int], torch.Tensor]:
        """Return what gives logits by places, as `_logits_of`, for the formats of the pass that was just queued."""
        return partial(self._logits_of, plan)

    @abstractmethod
    def _prepare_commits(self, plan: StepPlan) -> None:
        """Prepare what the plan commits, while the device computes."""

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

    def describe(self) -> dict[str, Any]:
        name = platform.processor() or platform.machine()
        if self.device.type != "cpu":
            name = str(torch.get_device_module(self.device).get_device_name(self.device))
        pool = self.prefixes.pool
        return {
            "engine": self.name,
            "device": name,
            "torch": torch.__version__,
            "dtype": str(self.cache.dtype).removeprefix("torch."),
            "mesh": {"dp": self.mesh.dp_size, "bp": self.mesh.bp_size, "tp": self.mesh.tp_size},
            "kv_cache_bytes": self.cache.num_bytes,
            "kv_pages": {"total": pool.num_pages, "in_use": pool.num_used, "most_in_use": pool.most_used},
            "graphs": sum(runner.num_captured for runner in self.runners),
            **self._details,
        }

    def close(self) -> None:
        if self._has_failed:
            return  # a collective may still wait on the device for a peer: only the process's end is sure to end it
        self.forget_captures()
        close_mesh()

    @property
    def graph_counts(self) -> tuple[int, int]:
        """What `graph_uses` says, since the start."""
        return graph_uses(*self.runners)

    def measure_passes(self, decode: DecodeConfig) -> PassCosts | None:
        return None

    def measure_floors(self) -> dict[str, float]:
        """bytes_per_s and flops_per_s of this device, measured now."""
        return measure_floors(self.device, self.cache.dtype, self.clock)

    def keep_times(self, wanted: bool) -> None:
        """Have the device note when each part of a pass begins and ends, or stop it: noting costs some 50 us a pass."""
        self._times.keep(wanted)

    def last_times_ms(self) -> dict[str, float]:
        """Device milliseconds of the last pass by part; empty where the device keeps no times."""
        return self._times.last_ms()

    def last_busy_ms(self) -> float:
        """The last step's time from queueing a pass to seeing its predictions, by the host's clock."""
        return self._busy.seconds * 1e3

    def last_num_tokens(self) -> int:
        return self.key.num_tokens

    def gather_ms(self, num_reads: int) -> float:
        """Milliseconds of gathering this many predictions of each rank over bp, captured where passes are."""
        if self.mesh.bp_group is None:
            return 0.0

        def gather(_: int, predicted_M3: torch.Tensor) -> None:
            for _ in range(_GATHERS):
                self._collectives.bp_stack(predicted_M3)

        gathers = GraphRunner(
            "gather", lambda key: torch.zeros((key, 3), device=self.device), gather, self._capture,
            agree=self._agree_on_head,
        )  # fmt: skip
        return self.clock(gathers.entry(num_reads).run, self.device) / _GATHERS * 1e3

    def length_updates_ms(self) -> dict[str, float]:
        """Milliseconds of the last pass's layers, launch and wait, where a replay needs its attention lengths written
        apart: with those it has, and with new ones written after the launch or before it."""
        return {}  # replays read their lengths on the device

    def num_experts_hit(self, plan: StepPlan) -> float | None:
        """Experts of a layer that such a pass reads, the mean over layers; None for a model without, or not known."""
        return None

    def memory(self) -> dict[str, float]:
        """Peak bytes of this process on the device, and what capture cost."""
        is_cpu = self.device.type == "cpu"
        peak = 0 if is_cpu else torch.get_device_module(self.device).max_memory_allocated(self.device)
        return {"peak_bytes": float(peak), **capture_costs(self.layers, self.head)}
