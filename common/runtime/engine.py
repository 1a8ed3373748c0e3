"""What every engine is around its passes: steps, errors as users read them, a description, the end."""

from __future__ import annotations

import platform
from typing import Any, Protocol

import torch

from common.config import DecodeConfig
from common.decoding import Capacity, Int, PassCosts, PredictionOrder, Predictions, StepPlan
from common.errors import EngineError
from common.processes import Mesh, close_mesh
from common.runtime.floors import measure_floors
from common.runtime.paging import PagePool
from common.runtime.passes import Passes
from common.runtime.waiting import explained
from graphs.runner import graph_uses


class KVMemory(Protocol):
    """The tensors of the KV cache."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Commits(Protocol):
    """Which KV is whose, and how it becomes final."""

    @property
    def pool(self) -> PagePool: ...

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        """As `common.decoding.Engine.commit`."""


class DeviceEngine:
    """`common.decoding.Engine` over one device a process, and what `common.bench.steps.Measurable` adds.

    A step: `launch` queues the pass over this rank's rows. While the device computes, the host prepares what the step
    commits, and the main loop hands over what has ended and reads what comes next. `receive` waits for the gathered
    predictions. `commit` makes the KV of the plan's spans final.
    """

    name: str  # as profiles name it

    def __init__(
        self, passes: Passes, kv: Commits, cache: KVMemory, capacity: Capacity, mesh: Mesh, details: dict[str, Any]
    ) -> None:
        self.capacity = capacity
        self.mesh = mesh
        self.num_steps = 0
        self.passes, self.kv, self.cache = passes, kv, cache
        self._details = details
        self._under_way: PredictionOrder | None = None
        self._has_failed = False

    def forward(self, plan: StepPlan) -> Predictions:
        self.launch(plan)
        return self.receive()

    def launch(self, plan: StepPlan) -> None:
        """Queue the pass over all rows."""
        if self._under_way is not None:
            self.receive()  # somebody stopped asking in the middle of a step
        try:
            self._under_way = self.passes.launch(plan)
        except RuntimeError as error:
            raise self._failed(error) from error

    def receive(self) -> Predictions:
        order, self._under_way = self._under_way, None
        assert order is not None, "receive follows launch"
        try:
            predictions = self.passes.receive(order)
        except RuntimeError as error:
            raise self._failed(error) from error
        self.num_steps += 1
        return predictions

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        assert self._under_way is None, "commit follows receive"
        try:
            self.kv.commit(plan, winner_row_of_request)
        except RuntimeError as error:
            raise self._failed(error) from error

    def measure_passes(self, decode: DecodeConfig) -> PassCosts | None:
        return None

    def describe(self) -> dict[str, Any]:
        device, pool = self.passes.device, self.kv.pool
        name = platform.processor() or platform.machine()
        if device.type != "cpu":
            name = str(torch.get_device_module(device).get_device_name(device))
        return {
            "engine": self.name,
            "device": name,
            "torch": torch.__version__,
            "dtype": str(self.cache.dtype).removeprefix("torch."),
            "mesh": {"dp": self.mesh.dp_size, "bp": self.mesh.bp_size, "tp": self.mesh.tp_size},
            "kv_cache_bytes": self.cache.num_bytes,
            "kv_pages": {"total": pool.num_pages, "in_use": pool.num_used, "most_in_use": pool.most_used},
            "graphs": sum(runner.num_captured for runner in self.passes.runners),
            **self._details,
        }

    def close(self) -> None:
        if self._has_failed:
            return  # a collective may still wait on the device for a peer: only the process's end is sure to end it
        for runner in self.passes.runners:
            runner.release()
        close_mesh()

    @property
    def graph_counts(self) -> tuple[int, int]:
        """What `graph_uses` says, since the start."""
        return graph_uses(*self.passes.runners)

    def measure_floors(self) -> dict[str, float]:
        return measure_floors(self.passes.device, self.cache.dtype, self.passes.clock)

    def keep_times(self, wanted: bool) -> None:
        self.passes.times.keep(wanted)

    def last_times_ms(self) -> dict[str, float]:
        return self.passes.times.last_ms()

    def last_busy_ms(self) -> float:
        return self.passes.busy.seconds * 1e3

    def last_num_tokens(self) -> int:
        return self.passes.key.num_tokens

    def gather_ms(self, num_reads: int) -> float:
        return self.passes.gather_ms(num_reads)

    def length_updates_ms(self) -> dict[str, float]:
        return self.passes.length_updates_ms()

    def memory(self) -> dict[str, float]:
        return self.passes.memory()

    def num_experts_hit(self, plan: StepPlan) -> float | None:
        return self.passes.num_experts_hit(plan)

    def _failed(self, error: RuntimeError) -> EngineError:
        """The error as users read it; after it the process has to end."""
        self._has_failed = True
        return explained(error, self.mesh.rank, self.num_steps)
