"""The CUDA engine, which also runs on CPU: one forward pass a step for this rank's share of the rows.

A plan's rows are dealt over the bp axis and queued on the device by `launch`; while it computes, the main loop hands
over what has ended and reads what comes next. `receive` waits for the gathered predictions. After the scheduler has
picked winners, `commit` copies their spans into the cache; with full attention and several branch ranks the winner's
owner broadcasts them first (Pre-Write, then Commit-Winner-Cache).
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.decoding import Int, PassCosts, Predictions, StepPlan, assign_rows
from common.errors import EngineError
from common.processes import close_mesh
from common.runtime import MeasuredEngine, PagedCapacity, explained, measure_floors
from graphs.runner import graph_uses
from lopa_cuda.budget import measure_passes
from lopa_cuda.floors import median_seconds
from lopa_cuda.parallel import Collectives
from lopa_cuda.passes import Pass, Passes
from lopa_cuda.steps import Committer, PagedKVCache, Staged


class CudaEngine(MeasuredEngine):
    """common.decoding.Engine over one device a process."""

    passes: Passes

    def __init__(
        self,
        passes: Passes,
        committer: Committer,
        cache: PagedKVCache,
        collectives: Collectives,
        capacity: PagedCapacity,
        config: ModelConfig,
        details: dict[str, Any],
    ) -> None:
        self.capacity = capacity
        self.mesh = collectives.mesh
        self.passes = passes
        self.cache = cache
        self.num_steps = 0
        self._config = config
        self._details = details
        self._committer = committer
        self._staged: Staged | None = None
        self._under_way: Pass | None = None
        self._has_failed = False

    def forward(self, plan: StepPlan) -> Predictions:
        self.launch(plan)
        return self.receive()

    def launch(self, plan: StepPlan) -> None:
        """Queue the pass over all rows."""
        if self._under_way is not None:
            self.receive()  # somebody stopped asking in the middle of a step
        try:
            self._staged = None
            self.passes.busy.reset()
            self._under_way = self.passes.launch(plan, assign_rows(plan, self.mesh.bp_size))
        except RuntimeError as error:
            raise self._failed(error) from error

    def receive(self) -> Predictions:
        under_way, self._under_way = self._under_way, None
        assert under_way is not None, "receive follows launch"
        try:
            predictions = self.passes.receive(under_way)
        except RuntimeError as error:
            raise self._failed(error) from error
        self._staged = under_way.staged
        self.num_steps += 1
        return predictions

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        if not plan.commits:
            return
        assert self._staged is not None, "commit follows receive"
        try:
            self._committer.commit(plan, winner_row_of_request, self._staged)
        except RuntimeError as error:
            raise self._failed(error) from error

    def describe(self) -> dict[str, Any]:
        device, pool = self.passes.device, self.cache.pool
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        return {
            "engine": "lopa_cuda",
            "device": name or platform.machine(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "dtype": str(self.cache.committed.dtype).removeprefix("torch."),
            "mesh": {"dp": self.mesh.dp_size, "bp": self.mesh.bp_size, "tp": self.mesh.tp_size},
            "kv_cache_bytes": self.cache.num_bytes,
            "kv_pages": {"total": pool.num_pages, "in_use": pool.num_used, "most_in_use": pool.most_used},
            **self._details,
        }

    @property
    def graph_counts(self) -> tuple[int, int]:
        """As `graph_uses`, since the start."""
        return graph_uses(self.passes.layers, self.passes.head, self._committer.runner)

    def measure_passes(self, decode: DecodeConfig) -> PassCosts:
        """A collective of all ranks."""
        try:
            return measure_passes(self.passes, self._config, decode, self.capacity.num_slots, self.mesh.bp_size)
        except RuntimeError as error:
            raise self._failed(error) from error

    def measure_floors(self) -> dict[str, float]:
        return measure_floors(self.passes.device, self.cache.committed.dtype, median_seconds)

    def close(self) -> None:
        if self._has_failed:
            return  # a collective may still wait on the device for a peer: only the process's end is sure to end it
        for runner in (self.passes.layers, self.passes.head, self._committer.runner):
            runner.release()
        close_mesh()

    def _failed(self, error: RuntimeError) -> EngineError:
        """The error as users read it; after it the process has to end."""
        self._has_failed = True
        return explained(error, self.mesh.rank, self.num_steps)
