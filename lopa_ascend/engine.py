"""The Ascend engine: one forward pass a step for this rank's share of the rows, over paged KV.

A step: `launch` lays out pages and tokens of this rank's rows and queues them. While the device computes, the host
works out what the step's commits do to the pages, which under block-causal attention does not depend on the winner, and
the main loop hands over what has ended and reads what comes next. `receive` waits for the gathered predictions.
`commit` only puts the prepared pages in force: no KV moves, neither on the device nor between ranks.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from common.config import DecodeConfig
from common.decoding import Int, PassCosts, PredictionOrder, Predictions, StepPlan, rows_by_rank
from common.errors import ConfigError
from common.processes import Mesh, close_mesh
from common.runtime import MeasuredEngine, explained
from graphs.runner import graph_uses
from lopa_ascend.floors import measure_npu_floors
from lopa_ascend.kv import BranchCapacity, PageBook, PagedKVCache
from lopa_ascend.ops import Ops
from lopa_ascend.passes import Forward, Reads, lay_out


class AscendEngine(MeasuredEngine):
    """common.decoding.Engine over one device a process."""

    passes: Forward

    def __init__(
        self, passes: Forward, cache: PagedKVCache, book: PageBook, mesh: Mesh, capacity: BranchCapacity,
        ops: Ops, details: dict[str, Any],
    ) -> None:  # fmt: skip
        self.capacity = capacity
        self.mesh = mesh
        self.passes = passes
        self.cache = cache
        self.book = book
        self.num_steps = 0
        self._ops = ops
        self._details = details
        self._under_way: PredictionOrder | None = None
        self._has_failed = False

    def forward(self, plan: StepPlan) -> Predictions:
        self.launch(plan)
        return self.receive()

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> None:
        if not plan.commits_locally:
            raise ConfigError("engine lopa_ascend: set decode.window_attention to block_causal")
        if self._under_way is not None:
            self.receive()  # somebody stopped asking in the middle of a step
        with self._explained():
            self.passes.busy.reset()
            rows_of = rows_by_rank(plan, self.mesh.bp_size)
            reads = Reads(plan, rows_of)
            flat = lay_out(plan, rows_of[self.mesh.bp_rank], self.book)
            self.cache.copy_pages(flat.copies)
            self._under_way = self.passes.launch(plan, flat, reads)
            self.book.prepare_commit(plan)

    def receive(self) -> Predictions:
        order, self._under_way = self._under_way, None
        assert order is not None, "receive follows launch"
        with self._explained():
            predictions = order.predictions(self.passes.wait())
            self.num_steps += 1
        return predictions

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        self.book.commit()

    @property
    def graph_counts(self) -> tuple[int, int]:
        """As `graph_uses`, since the start."""
        return graph_uses(self.passes.layers, self.passes.head)

    def measure_passes(self, decode: DecodeConfig) -> PassCosts | None:
        return None

    def describe(self) -> dict[str, Any]:
        device, pool = self.passes.device, self.book.pool
        return {
            "engine": "lopa_ascend",
            "device": platform.processor() or platform.machine() if device.type == "cpu" else _npu_name(device),
            "torch": torch.__version__,
            "dtype": str(self.cache.dtype).removeprefix("torch."),
            "mesh": {"dp": self.mesh.dp_size, "bp": self.mesh.bp_size, "tp": self.mesh.tp_size},
            "kv_cache_bytes": self.cache.num_bytes,
            "kv_pages": {"total": pool.num_pages, "in_use": pool.num_used, "most_in_use": pool.most_used},
            "graphs": self.passes.layers.num_captured + self.passes.head.num_captured,
            **self._details,
        }

    def measure_floors(self) -> dict[str, float]:
        return measure_npu_floors(self._ops, self.passes.device, self.cache.dtype)

    def close(self) -> None:
        if self._has_failed:
            return  # a collective may still wait on the device for a peer: only the process's end is sure to end it
        for runner in (self.passes.layers, self.passes.head):
            runner.release()
        close_mesh()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Device errors as EngineError that names rank and step; after one, the process has to end."""
        try:
            yield
        except RuntimeError as error:
            self._has_failed = True
            raise explained(error, self.mesh.rank, self.num_steps) from error


def _npu_name(device: torch.device) -> str:
    return str(torch.npu.get_device_name(device))
