"""The CUDA engine, which also runs on CPU: one forward pass a step for this rank's share of the rows.

A plan's rows are dealt over the bp axis and queued on the device by `launch`; while it computes, the main loop hands
over what has ended and reads what comes next. `receive` waits for the gathered predictions. After the scheduler has
picked winners, `commit` copies their spans into the cache; with full attention and several branch ranks the winner's
owner broadcasts them first (Pre-Write, then Commit-Winner-Cache).
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import numpy as np
import torch

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.decoding import Capacity, Int, Predictions, StepPlan, assign_rows
from common.errors import EngineError
from common.processes import close_mesh
from common.runtime import MeasuredEngine, explained, measure_floors
from lopa_cuda.budget import count_paying_lookaheads
from lopa_cuda.floors import median_seconds
from lopa_cuda.parallel import Collectives
from lopa_cuda.passes import Pass, Passes
from lopa_cuda.steps import Committer, StagedPart, StaticKVCache
from lopa_cuda.warmup import warm_up


class UnderWay(NamedTuple):
    """The pass of a step that has not answered yet, and what earlier passes of the step have answered."""

    launched: Pass
    rows: Int
    width: int
    together: Predictions | None


class CudaEngine(MeasuredEngine):
    """common.decoding.Engine over one device a process."""

    passes: Passes

    def __init__(
        self,
        passes: Passes,
        committer: Committer,
        cache: StaticKVCache,
        collectives: Collectives,
        capacity: Capacity,
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
        self._parts: list[StagedPart] = []
        self._under_way: UnderWay | None = None
        self._has_failed = False

    def forward(self, plan: StepPlan) -> Predictions:
        self.launch(plan)
        return self.receive()

    def launch(self, plan: StepPlan) -> None:
        """Queue the pass over all rows. Where rows are so different in width that padding would cost more than another
        pass, those of other widths are computed here and only the last pass is left to wait for."""
        if self._under_way is not None:
            self.receive()  # somebody stopped asking in the middle of a step
        try:
            self._parts = []
            self.passes.busy.reset()
            groups = rows_by_width(plan.num_entries_R, self.passes.buckets.knee)
            together = None if len(groups) == 1 else _no_predictions(plan)
            # Captured passes share one staging memory, which must last until the commit: only the last may be captured.
            for rows in groups[:-1]:
                assert together is not None
                part = _rows_of(plan, rows)
                _put(together, rows, self.passes.receive(self._launch(part, rows, may_replay=False)), part.width)
            rows = groups[-1]
            part = plan if together is None else _rows_of(plan, rows)
            self._under_way = UnderWay(self._launch(part, rows, may_replay=True), rows, part.width, together)
        except RuntimeError as error:
            raise self._failed(error) from error

    def receive(self) -> Predictions:
        under_way, self._under_way = self._under_way, None
        assert under_way is not None, "receive follows launch"
        try:
            predictions = self.passes.receive(under_way.launched)
        except RuntimeError as error:
            raise self._failed(error) from error
        self.num_steps += 1
        if under_way.together is None:
            return predictions
        _put(under_way.together, under_way.rows, predictions, under_way.width)
        return under_way.together

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        if not plan.commits:
            return
        try:
            self._committer.commit(plan, winner_row_of_request, self._parts)
        except RuntimeError as error:
            raise self._failed(error) from error

    def describe(self) -> dict[str, Any]:
        device = self.passes.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        return {
            "engine": "lopa_cuda",
            "device": name or platform.machine(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "dtype": str(self.cache.committed.dtype).removeprefix("torch."),
            "mesh": {"dp": self.mesh.dp_size, "bp": self.mesh.bp_size, "tp": self.mesh.tp_size},
            "kv_cache_bytes": self.cache.num_bytes,
            **self._details,
        }

    def num_paying_lookaheads(self, decode: DecodeConfig) -> int:
        """What `num_lookahead: auto` stands for on this device and mesh; a collective of all ranks."""
        try:
            num_lookahead = count_paying_lookaheads(self.passes, self._config, decode, self.mesh.bp_size)
            decode = decode.model_copy(update={"num_lookahead": num_lookahead})
            warm_up(self.passes, self._committer, self._config, decode, self.capacity.num_slots, self.mesh.bp_size)
        except RuntimeError as error:
            raise self._failed(error) from error
        return num_lookahead

    def measure_floors(self) -> dict[str, float]:
        return measure_floors(self.passes.device, self.cache.committed.dtype, median_seconds)

    def close(self) -> None:
        if self._has_failed:
            return  # a collective may still wait on the device for a peer: only the process's end is sure to end it
        for runner in (self.passes.layers, self.passes.head, self._committer.runner):
            runner.release()
        close_mesh()

    def _launch(self, plan: StepPlan, rows: Int, *, may_replay: bool) -> Pass:
        """Queue a plan whose rows have these numbers in the step's."""
        row_of = assign_rows(plan, self.mesh.bp_size)
        launched = self.passes.launch(plan, row_of, may_replay=may_replay)
        self._parts.append(StagedPart(rows[row_of], launched.width, self.cache.staging))
        return launched

    def _failed(self, error: RuntimeError) -> EngineError:
        """The error as users read it; after it the process has to end."""
        self._has_failed = True
        return explained(error, self.mesh.rank, self.num_steps)


def _no_predictions(plan: StepPlan) -> Predictions:
    return Predictions(np.zeros(plan.entries_3RW.shape, dtype=np.float32))


def _put(together: Predictions, rows: Int, found: Predictions, width: int) -> None:
    together.values_3RW[:, rows, :width] = found.values_3RW


def rows_by_width(num_entries_R: Int, knee: float) -> list[Int]:
    """Rows that are forwarded together, the widest first.

    A pass costs at least what reading the weights does, which is `knee` tokens; a group of its own must save twice that
    in padding.
    """
    return _groups(np.arange(len(num_entries_R)), num_entries_R, 2 * knee)


def _groups(rows: Int, num_entries_R: Int, least_saving: float) -> list[Int]:
    num_entries = num_entries_R[rows]
    widths = num_entries.tolist()
    widest = max(widths)
    if len(rows) * widest - sum(widths) <= least_saving:  # all the padding there is
        return [rows]
    saved, width = max((int((num_entries <= w).sum()) * (widest - w), w) for w in set(widths))
    if saved <= least_saving:
        return [rows]
    halves = rows[num_entries > width], rows[num_entries <= width]
    return [group for half in halves for group in _groups(half, num_entries_R, least_saving)]


def _rows_of(plan: StepPlan, rows: Int) -> StepPlan:
    """The plan of some of its rows, as narrow as they allow; request numbers stay the step's."""
    width = int(plan.num_entries_R[rows].max())
    requests = set(plan.request_R[rows].tolist())
    return plan._replace(
        entries_3RW=plan.entries_3RW[:, rows, :width],
        is_read_RW=plan.is_read_RW[rows, :width],
        row_fields_7R=plan.row_fields_7R[:, rows],
        request_R=plan.request_R[rows],
        commits=tuple(span for span in plan.commits if span.request in requests),
    )
