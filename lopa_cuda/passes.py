"""One forward pass over rows of this rank: through the layers at one padded shape, through the head at another.

fill row buffers -> layers (each pre-writes its window's KV), norm -> hidden states -> fill read buffers -> head where
the scheduler reads -> statistics -> gather over bp -> host. Each half is captured once a shape and replayed; the
second is queued while the first runs, and the host waits once, for the gathered predictions.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.decoding import Int, Predictions, StepPlan
from common.model import Dream, sampled_statistics
from common.runtime import PassTimes, Stopwatch, wait_until_done
from graphs.buckets import Buckets, cached_bucket, round_up
from graphs.runner import Capture, GraphRunner, capture_costs
from lopa_cuda.floors import median_seconds
from lopa_cuda.ops import CudaOps
from lopa_cuda.parallel import Collectives
from lopa_cuda.steps import ReadBuffers, Reads, ReadsKey, RowBuffers, RowsKey, StaticKVCache


class Pass(NamedTuple):
    """A forward pass that is on its way."""

    reads: Reads
    predicted_PM3: np.ndarray  # on the host, once the device has come to its end
    width: int  # padded, by which windows are laid out


class Passes:
    """The model's forward passes, as they are or captured.

    buckets bounds what is captured; without `capture` every pass runs at its own shape.
    """

    def __init__(
        self, model: Dream, ops: CudaOps, cache: StaticKVCache, collectives: Collectives, device: torch.device,
        buckets: Buckets, capture: Capture | None, timeout_s: float,
    ) -> None:  # fmt: skip
        self.device = device
        self.buckets = buckets
        self.model = model
        self._ops = ops
        self._cache = cache
        self._collectives = collectives
        self._bp_rank = collectives.mesh.bp_rank
        self._capture = capture
        self._timeout_s = timeout_s
        width, dtype = model.norm.weight.shape[0], model.norm.weight.dtype
        num_static = buckets.max_tokens if capture else 0
        self._captured_hidden_TD = torch.zeros((num_static, width), dtype=dtype, device=device)
        self._hidden_TD = self._captured_hidden_TD
        self._key_of: dict[tuple[int, int, bool], RowsKey] = {}
        self.busy = Stopwatch()
        self.times = PassTimes(partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None)
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self.layers = GraphRunner("layers", self._row_buffers, self._run_layers, capture)
        self.head = GraphRunner("head", self._read_buffers, self._run_head, capture)

    def run(self, plan: StepPlan, row_of: Int) -> Predictions:
        return self.receive(self.launch(plan, row_of))

    def launch(self, plan: StepPlan, row_of: Int, *, may_replay: bool = True) -> Pass:
        """Queue the plan's rows `row_of` [bp rank, place]. Passes of one shape share buffers: receive one before the
        next is launched."""
        rows_key = self.rows_key(plan, row_of, may_replay=may_replay)
        layers = self.layers.entry(rows_key, is_captured=rows_key.is_captured)
        layers.buffers.fill(plan, row_of[self._bp_rank])
        if rows_key.is_captured:  # a pass that is not replayed does this itself
            self._cache.use_staging(rows_key.num_tokens, is_captured=True)
        self.times.mark(0)
        self.busy.start()
        layers.run()
        if rows_key.is_captured:
            self.busy.start()  # the device begins once it has the whole graph
        self.times.mark(1)
        reads = Reads(plan, row_of)
        num_reads = max(1, reads.most)
        if self._capture is not None:
            num_reads = self.buckets.reads(num_reads)
        reads_key = ReadsKey(num_reads, plan.sampling, rows_key.is_captured)
        head = self.head.entry(reads_key, is_captured=rows_key.is_captured)
        head.buffers.fill(plan, reads, self._bp_rank, rows_key.width)
        head.run()
        self.times.mark(2)
        if self._done is not None:
            self._done.record()
        reads.order(num_reads)
        return Pass(reads, head.buffers.predicted_PM3, rows_key.width)

    def receive(self, launched: Pass) -> Predictions:
        """Wait for the pass launched last."""
        wait_until_done(self._done, self._timeout_s)
        self.busy.stop()
        return launched.reads.predictions(launched.predicted_PM3)

    def gather_ms(self, num_reads: int) -> float:
        """The gather over bp alone, captured where passes are."""
        if self._collectives.mesh.bp_group is None:
            return 0.0
        predicted_M3 = torch.zeros((num_reads, 3), device=self.device)
        repeats = 10

        def work() -> None:
            for _ in range(repeats):
                self._collectives.bp_stack(predicted_M3)

        work()
        replay = self._capture(work) if self._capture else work
        return median_seconds(replay, self.device) / repeats * 1e3

    def memory(self) -> dict[str, float]:
        """Peak bytes of this process on the device, and what capture cost."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {"peak_bytes": float(peak), **capture_costs(self.layers, self.head)}

    @property
    def max_cached(self) -> int:
        """Cached keys that a pass may look at: RowsKey.num_cached of operators that take lengths from the device."""
        return self._cache.max_model_len

    @property
    def captures_ahead(self) -> bool:
        """Whether a shape's key is known before the step: operators that look at a host number of keys make many."""
        return self._capture is not None and self._ops.reads_device_lengths

    def rows_key(self, plan: StepPlan, row_of: Int, *, may_replay: bool = True) -> RowsKey:
        """Every rank comes to the same key, since it depends on the plan alone."""
        if not self._ops.reads_device_lengths:
            return self._rows_key(row_of.shape[1], plan.width, may_replay, int(plan.cached_R[row_of].max()))
        shape = row_of.shape[1], plan.width, may_replay
        if shape not in self._key_of:
            self._key_of[shape] = self._rows_key(*shape, self.max_cached)
        return self._key_of[shape]

    def _rows_key(self, num_rows: int, width: int, may_replay: bool, num_cached: int) -> RowsKey:
        shape = self.buckets.shape(num_rows, width) if self._capture and may_replay else None
        # Kernels are compiled for sizes that 16 divides: a prompt of any length then finds them compiled.
        padded_rows, padded_width = shape or (num_rows, round_up(width, 16) if self._capture else width)
        if shape is not None and not self._ops.reads_device_lengths:
            num_cached = cached_bucket(num_cached, self.max_cached)
        return RowsKey(padded_rows, padded_width, num_cached, shape is not None)

    def _row_buffers(self, key: RowsKey) -> RowBuffers:
        return RowBuffers(key, self.device, has_one_slot=self._cache.num_slots == 1)

    def _read_buffers(self, key: ReadsKey) -> ReadBuffers:
        return ReadBuffers(key, self.device, self._collectives.mesh.bp_size)

    @torch.inference_mode()
    def _run_layers(self, key: RowsKey, rows: RowBuffers) -> None:
        rows.send()
        self._cache.use_staging(key.num_tokens, is_captured=key.is_captured)
        hidden_TD = self.model(rows.token_T, self._ops.plan(rows.step))
        if key.is_captured:
            self._captured_hidden_TD[: key.num_tokens].copy_(hidden_TD)
            hidden_TD = self._captured_hidden_TD
        self._hidden_TD = hidden_TD

    @torch.inference_mode()
    def _run_head(self, key: ReadsKey, reads: ReadBuffers) -> None:
        reads.send()
        hidden_TD = self._captured_hidden_TD if key.is_captured else self._hidden_TD
        predicted_M3 = self._predict(hidden_TD.index_select(0, reads.index_M), key, reads)
        reads.receive(self._collectives.bp_stack(predicted_M3))

    def _predict(self, hidden_MD: Tensor, key: ReadsKey, reads: ReadBuffers) -> Tensor:
        """[M, 3]: token, probability, confidence."""
        ops, head, vocab_start = self._ops, self.model.lm_head, self.model.vocab_start
        stack = self._collectives.tp_stack
        if reads.noise_keys is None:
            statistics_M6 = ops.statistics(hidden_MD, head, vocab_start, key.sampling)
            return ops.merge(stack(statistics_M6), key.sampling.strategy)
        logits_MV = ops.logits(hidden_MD, head)
        return sampled_statistics(
            logits_MV, vocab_start, key.sampling, reads.noise_keys, self._collectives.tp_sum, stack
        )
