"""One forward pass over rows of this rank: through the layers at one padded size, through the head at another.

fill step buffers -> layers (each pre-writes its window's KV) up to the last attention -> fill read buffers -> where the
scheduler reads: the rest of the last layer, norm, head -> statistics -> gather over bp -> host. Each half is captured
once a size and replayed; the second is queued while the first runs, and the host waits once, for the gathered
predictions.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.decoding import Int, PredictionOrder, Predictions, Sampling, StepPlan
from common.model import Activation, Decoder, changed_logits, merge_statistics, sampled_statistics, special_statistics
from common.runtime import PassTimes, Stopwatch, wait_until_done
from graphs.buckets import Buckets
from graphs.runner import Capture, GraphRunner, capture_costs
from lopa_cuda.floors import median_seconds
from lopa_cuda.ops import CudaOps
from lopa_cuda.parallel import Collectives
from lopa_cuda.shapes import Shapes
from lopa_cuda.steps import (
    Handover,
    LayersKey,
    PagedKVCache,
    ReadBuffers,
    Reads,
    ReadsKey,
    Staged,
    StagedSlice,
    StepBuffers,
    deal,
)


class Pass(NamedTuple):
    """A forward pass that is on its way."""

    order: PredictionOrder
    predicted_PM3: np.ndarray  # on the host, once the device has come to its end
    staged: Staged


class Passes:
    """The model's forward passes, as they are or captured.

    buckets bounds what is captured; without `capture` every pass runs at its own size.
    """

    def __init__(
        self, model: Decoder, ops: CudaOps, cache: PagedKVCache, collectives: Collectives, device: torch.device,
        buckets: Buckets, capture: Capture | None, timeout_s: float,
    ) -> None:  # fmt: skip
        self.device = device
        self.shapes = Shapes(
            collectives.mesh, buckets, ops.tiling, cache.captured_staging.shape[2], captures=capture is not None
        )
        self.model = model
        self._ops = ops
        self._cache = cache
        self._collectives = collectives
        self._bp_rank = collectives.mesh.bp_rank
        self._capture = capture
        self._timeout_s = timeout_s
        self._handover = Handover(ops.copy_rows, buckets.tokens[-1])
        self.num_tokens = 0
        self.busy = Stopwatch()
        self.times = PassTimes(partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None)
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self.layers = GraphRunner("layers", self._step_buffers, self._run_layers, capture)
        self.head = GraphRunner("head", self._read_buffers, self._run_head, capture)

    def run(self, plan: StepPlan, row_of: Int) -> Predictions:
        return self.receive(self.launch(plan, row_of))

    def launch(self, plan: StepPlan, row_of: Int) -> Pass:
        """Queue the plan's rows `row_of` [bp rank, place]. Passes share buffers and staging memory: receive one, and
        commit it, before the next is launched."""
        self._cache.open_step(plan)
        shares, key = self.shapes.arranged(plan, row_of)
        self.num_tokens = key.num_tokens
        layers = self.layers.entry(key, is_captured=key.is_captured)
        layers.buffers.fill(plan, shares[self._bp_rank])
        if key.is_captured:  # a pass that is not replayed does this itself
            self._cache.use_staging(key.num_staged, is_captured=True)
            self._handover.use_captured()
        self.times.mark(0)
        self.busy.start()
        layers.run()
        if key.is_captured:
            self.busy.start()  # the device begins once it has the whole graph
        self.times.mark(1)
        reads = Reads(plan, shares)
        reads_key = self.shapes.reads_key(reads.most, plan.sampling, is_captured=key.is_captured)
        head = self.head.entry(reads_key, is_captured=reads_key.is_captured)
        head.buffers.fill(plan, reads, self._bp_rank)
        head.run()
        self.times.mark(2)
        if self._done is not None:
            self._done.record()
        order = reads.order(reads_key.num_reads)
        self._cache.prepare_commits(plan)
        staged = Staged(row_of, shares, self._cache.staging, is_whole=key.num_slices == len(shares))
        return Pass(order, head.buffers.predicted_PM3, staged)

    def receive(self, launched: Pass) -> Predictions:
        """Wait for the pass launched last."""
        wait_until_done(self._done, self._timeout_s)
        self.busy.stop()
        return launched.order.predictions(launched.predicted_PM3)

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

    def length_updates_ms(self) -> dict[str, float]:
        """Replays read their lengths on the device."""
        return {}

    def memory(self) -> dict[str, float]:
        """Peak bytes of this process on the device, and what capture cost."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        peak += self._cache.peers.staging.nbytes if self._cache.peers else 0  # which torch's allocator does not count
        return {"peak_bytes": float(peak), **capture_costs(self.layers, self.head)}

    @torch.inference_mode()
    def num_experts_hit(self, plan: StepPlan) -> float | None:
        """Experts of a layer that a pass over all rows reads, the mean over layers; None for a model without. Behind a
        pass of this plan, whose pages it reads."""
        shares = deal(plan, np.arange(plan.num_rows)[None])
        key = self.shapes.dealt_key(shares)._replace(is_captured=False)
        self._ops.noted_experts = noted = []
        try:
            entry = self.layers.entry(key, is_captured=False)
            entry.buffers.fill(plan, shares[0])
            entry.run()
            self._hidden(torch.arange(key.num_tokens, device=self.device), is_captured=False)
        finally:
            self._ops.noted_experts = None
        return sum(expert_TC.unique().numel() for expert_TC in noted) / len(noted) if noted else None

    @property
    def max_model_len(self) -> int:
        return self._cache.max_model_len

    @property
    def captures_ahead(self) -> bool:
        return self.shapes.captures_ahead

    def capture(self, num_tokens: int) -> None:
        """The layers at one of the buckets' sizes, before a step needs them."""
        self.layers.entry(self.shapes.captured_key(num_tokens))

    def capture_slice(self, num_tokens: int) -> None:
        """The layers of a pass that is cut over ranks, at one of the shapes' slices."""
        self.layers.entry(self.shapes.captured_key(num_tokens, is_cut=True))

    def capture_head(self, num_reads: int, sampling: Sampling) -> None:
        self.head.entry(ReadsKey(num_reads, sampling, is_captured=True))

    def _step_buffers(self, key: LayersKey) -> StepBuffers:
        staged = StagedSlice(key.num_tokens, self._collectives if key.num_slices > 1 else None)
        return StepBuffers(key, self.device, self._ops.tiling, staged)

    def _read_buffers(self, key: ReadsKey) -> ReadBuffers:
        return ReadBuffers(key, self.device, self._collectives.mesh.bp_size)

    @torch.inference_mode()
    def _run_layers(self, key: LayersKey, buffers: StepBuffers) -> None:
        buffers.send()
        self._cache.use_staging(key.num_staged, is_captured=key.is_captured)
        attended, residual_TD = self.model.until_last_attention(buffers.token_T, self._ops.plan(buffers.step))
        self._handover.leave(attended, residual_TD, is_captured=key.is_captured)

    @torch.inference_mode()
    def _run_head(self, key: ReadsKey, reads: ReadBuffers) -> None:
        reads.send()
        reads.receive(self._collectives.bp_stack(self._predict(key, reads)))

    def _predict(self, key: ReadsKey, reads: ReadBuffers) -> Tensor:
        """[M, 3]: token, probability, confidence."""
        ops, head, vocab_start = self._ops, self.model.lm_head, self.model.vocab_start
        stack = self._collectives.tp_stack
        if key.sampling.is_special:
            return self._predict_specially(key.sampling, reads)
        hidden = self._hidden(reads.index_M, is_captured=key.is_captured)
        if reads.sampling_rows is None:
            statistics_M6 = ops.statistics(hidden, head, vocab_start, key.sampling)
            return ops.merge(stack(statistics_M6), key.sampling.strategy)
        return ops.sampled(hidden, head, vocab_start, key.sampling, reads.sampling_rows, stack)

    def _hidden(self, index_M: Tensor, *, is_captured: bool) -> Activation:
        """[M, D] of these tokens, as the head reads them."""
        return self.model.finish(*self._handover.take(index_M, is_captured=is_captured), self.model.lm_head)

    def _predict_specially(self, sampling: Sampling, reads: ReadBuffers) -> Tensor:
        """[M, 3] by plain operators; see common.model.special."""
        head, vocab_start, stack = self.model.lm_head, self.model.vocab_start, self._collectives.tp_stack
        guide_NV = None
        if sampling.cfg_scale:
            guide_NV = self._ops.logits(self._hidden(reads.guide_M, is_captured=False), head)
        logits_NV = self._ops.logits(self._hidden(reads.index_M, is_captured=False), head)
        logits_NV = changed_logits(logits_NV, guide_NV, reads.lowered_M, vocab_start, sampling)
        if reads.sampling_rows is None:
            return merge_statistics(stack(special_statistics(logits_NV, vocab_start, sampling)), sampling.strategy)
        return sampled_statistics(logits_NV, vocab_start, sampling, reads.sampling_rows, stack)
