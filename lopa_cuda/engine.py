"""The CUDA engine, which also runs on CPU: a step (common.runtime.engine) over staging memory and paged KV.

fill step buffers -> layers (each pre-writes its window's KV) up to the last attention -> fill read buffers -> where the
scheduler reads: the rest of the last layer, norm, head -> statistics -> gather over bp -> host. All of this but the
filling is in the two graphs of a captured pass. A commit copies the winner's KV; with full attention and several branch
ranks its owner broadcasts it first (Pre-Write, then Commit-Winner-Cache).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.decoding import Capacity, Int, PassCosts, Sampling, StepPlan, assign_rows
from common.model import (
    Activation,
    Decoder,
    best_statistics,
    changed_logits,
    merge_statistics,
    sampled_statistics,
    special_statistics,
)
from common.runtime import Collectives, DeviceEngine, ReadsKey, wait_until_done
from graphs.buckets import Buckets
from graphs.cuda import outliving_capture
from graphs.runner import Capture, Entry
from lopa_cuda.floors import median_seconds
from lopa_cuda.ops import TorchOps
from lopa_cuda.pass_costs import measure_passes
from lopa_cuda.shapes import Shapes
from lopa_cuda.steps import (
    Committer,
    Handover,
    LayersKey,
    PagedKVCache,
    ReadBuffers,
    Share,
    Staged,
    StagedSlice,
    StepBuffers,
    deal,
    in_whole_blocks,
)

if TYPE_CHECKING:
    from lopa_cuda.ops.fused import FusedOps


class CudaEngine(DeviceEngine):
    """config: the model's. buckets bounds what is captured."""

    name = "lopa_cuda"
    clock = staticmethod(median_seconds)
    key: LayersKey
    cache: PagedKVCache
    kv: Committer

    def __init__(
        self, model: Decoder, config: ModelConfig, ops: TorchOps | FusedOps, cache: PagedKVCache, capacity: Capacity,
        collectives: Collectives, device: torch.device, buckets: Buckets, capture: Capture | None, timeout_s: float,
        details: dict[str, Any],
    ) -> None:  # fmt: skip
        committer, wait = Committer(cache, collectives, capture), partial(wait_until_done, timeout_s=timeout_s)
        super().__init__(
            model, cache, committer, capacity, collectives, device, capture, wait, details,
            reduce_classes=ops.class_statistics,
        )  # fmt: skip
        self.runners.append(committer.runner)
        captured_tokens = cache.captured_staging.shape[2]
        self._routing_block = config.routing_block or 1
        self.shapes = Shapes(
            self.mesh, buckets, ops.tiling, captured_tokens, captures=capture is not None,
            routing_block=self._routing_block,
        )  # fmt: skip
        self._config = config
        self._ops = ops
        self._handover = Handover(ops.copy_rows, buckets.tokens[-1])
        self._row_of: Int = np.zeros((1, 0), dtype=np.int64)  # rows of the last launch, and their shares
        self._shares: list[Share] = []
        self._tokens_read: Int = np.zeros(0, dtype=np.int64)  # of this rank's share
        self._logits_MV: Tensor | None = None  # of the last head, where formats are to read them

    def measure_passes(self, decode: DecodeConfig) -> PassCosts:
        """Collective over all ranks."""
        try:
            return measure_passes(self, self._config, decode)
        except RuntimeError as error:
            raise self._failed(error) from error

    def memory(self) -> dict[str, float]:
        found = super().memory()
        found["peak_bytes"] += self.cache.peers.staging.nbytes if self.cache.peers else 0  # torch does not count it
        return found

    @torch.inference_mode()
    def num_experts_hit(self, plan: StepPlan) -> float | None:
        """Return how many experts a pass of this plan hits; call it after that pass, whose pages it reads."""
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

    def _new_event(self, *, is_timed: bool) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=is_timed)

    def _lay_out(self, plan: StepPlan) -> Entry[StepBuffers]:
        """Deals the rows over the branch ranks, or cuts the entries where that pays."""
        self.cache.open_step(plan)
        self._row_of = assign_rows(plan, self._bp_size)
        self._shares, key = self.shapes.arranged(plan, self._row_of)
        self.key = key
        layers = self.layers.entry(key, is_captured=key.is_captured)
        layers.buffers.fill(plan, self._shares[self._bp_rank])
        if key.is_captured:  # a pass that is not replayed does this itself
            self.cache.use_staging(key.num_staged, is_captured=True)
            self._handover.use_captured()
        return layers

    def _launch_head(self, plan: StepPlan) -> tuple[Sequence[Int], npt.NDArray[np.float32]]:
        is_read_T = in_whole_blocks(plan.is_read_T, self._routing_block)  # which the last layer routes together
        tokens_of = [share.of_entries(is_read_T).nonzero()[0] for share in self._shares]
        entries_of = [share.in_plan(tokens) for share, tokens in zip(self._shares, tokens_of, strict=True)]
        key = self.shapes.reads_key(max(map(len, tokens_of)), plan.sampling, is_captured=self.key.is_captured)
        head = self.head.entry(key, is_captured=key.is_captured)
        self._tokens_read = tokens_of[self._bp_rank]
        head.buffers.fill(plan, self._tokens_read, entries_of[self._bp_rank])
        head.run()
        self._logits_MV = None if plan.automaton_of is None else head.buffers.logits_MV
        return entries_of, head.buffers.predicted_PM3

    @torch.inference_mode()
    def _logits_of(self, plan: StepPlan, place_M: Int) -> Tensor:
        share, is_wanted_T = self._shares[self._bp_rank], np.zeros(plan.num_tokens, dtype=np.bool_)
        wanted_M = self._tokens_read[place_M] if len(self._tokens_read) else place_M
        is_wanted_T[share.in_plan(wanted_M)] = True
        token_M = share.of_entries(in_whole_blocks(is_wanted_T, self._routing_block)).nonzero()[0]
        key = self.shapes.reads_key(len(token_M), plan.sampling, is_captured=False)
        reads = ReadBuffers(key, self.device, self._bp_size)
        reads.fill(plan, token_M, share.in_plan(token_M))
        reads.send()
        place_M = token_M.searchsorted(wanted_M)
        return self._logits(plan.sampling, reads).index_select(0, torch.from_numpy(place_M).to(self.device))

    def _logits_for_formats(self, plan: StepPlan) -> Callable[[Int], Tensor]:
        logits_MV, self._logits_MV = self._logits_MV, None
        return super()._logits_for_formats(plan) if logits_MV is None else partial(_rows, logits_MV)

    def _prepare_commits(self, plan: StepPlan) -> None:
        self.cache.prepare_commits(plan)
        shares = self._shares
        is_whole = self.key.num_slices == len(shares)
        self.kv.staged = Staged(self._row_of, shares, self.cache.staging, is_whole=is_whole)

    def _step_buffers(self, key: LayersKey) -> StepBuffers:
        staged = StagedSlice(key.num_tokens, self._collectives if key.num_slices > 1 else None)
        return StepBuffers(key, self.device, self._ops.tiling, staged)

    @torch.inference_mode()
    def _run_layers(self, key: LayersKey, buffers: StepBuffers) -> None:
        buffers.send()
        self.cache.use_staging(key.num_staged, is_captured=key.is_captured)
        attended, residual_TD = self.model.until_last_attention(buffers.token_T, self._ops.plan(buffers.step))
        self._handover.leave(attended, residual_TD, is_captured=key.is_captured)

    def _read_buffers(self, key: ReadsKey) -> ReadBuffers:
        return ReadBuffers(key, self.device, self._bp_size)

    @torch.inference_mode()
    def _run_head(self, key: ReadsKey, buffers: ReadBuffers) -> None:
        buffers.send()
        if key.sampling.is_special:
            predicted_M3 = self._predict_specially(key.sampling, buffers)
        else:
            hidden = self._hidden(buffers.index_M, is_captured=key.is_captured)
            logits_MV = self._ops.logits(hidden, self.model.lm_head)
            predicted_M3 = self._predict(logits_MV, key, buffers)
            buffers.logits_MV = outliving_capture(logits_MV)
        buffers.receive(self._collectives.bp_stack(predicted_M3))

    def _predict(self, logits_MV: Tensor, key: ReadsKey, reads: ReadBuffers) -> Tensor:
        """Token, probability and confidence [M, 3] of this rank's reads."""
        ops, vocab_start, stack = self._ops, self.model.vocab_start, self._collectives.tp_stack
        if key.sampling.num_best:
            return best_statistics(logits_MV, vocab_start, key.sampling, stack)
        if reads.sampling_rows is None:
            return ops.merge(stack(ops.statistics(logits_MV, vocab_start, key.sampling)), key.sampling.strategy)
        return ops.sampled(logits_MV, vocab_start, key.sampling, reads.sampling_rows, stack)

    def _hidden(self, index_M: Tensor, *, is_captured: bool) -> Activation:
        """Hidden states [M, D] of these tokens, in the form that the head reads."""
        return self.model.finish(*self._handover.take(index_M, is_captured=is_captured), self.model.lm_head)

    def _predict_specially(self, sampling: Sampling, reads: ReadBuffers) -> Tensor:
        """The same by plain operators; see common.model.special."""
        vocab_start, stack = self.model.vocab_start, self._collectives.tp_stack
        logits_NV = self._logits(sampling, reads)
        if reads.sampling_rows is None:
            return merge_statistics(stack(special_statistics(logits_NV, vocab_start, sampling)), sampling.strategy)
        return sampled_statistics(logits_NV, vocab_start, sampling, reads.sampling_rows, stack)

    def _logits(self, sampling: Sampling, reads: ReadBuffers) -> Tensor:
        """This shard's logits [M, V], changed as a special pass asks."""
        head, guide_NV = self.model.lm_head, None
        if sampling.cfg_scale:
            guide_NV = self._ops.logits(self._hidden(reads.guide_M, is_captured=False), head)
        logits_NV = self._ops.logits(self._hidden(reads.index_M, is_captured=False), head)
        if not sampling.is_special:
            return logits_NV
        return changed_logits(logits_NV, guide_NV, reads.lowered_M, self.model.vocab_start, sampling)


def _rows(logits_MV: Tensor, place_N: Int) -> Tensor:
    """Return these rows; a view where they follow each other."""
    first = int(place_N[0])
    if np.array_equal(place_N, np.arange(first, first + len(place_N))):
        return logits_MV[first : first + len(place_N)]
    return logits_MV.index_select(0, torch.from_numpy(place_N).to(logits_MV.device))
