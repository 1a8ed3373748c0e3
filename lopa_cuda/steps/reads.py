"""What goes through the head: which hidden states, and where their predictions belong.

Reads are padded to the shape of the buffers; a padding read repeats the first token.

Shapes: T tokens, M reads of a rank, P branch-parallel ranks, N reads of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.decoding import PredictionOrder, Sampling, StepPlan
from common.model import NUM_SAMPLING_FIELDS, SamplingRows, sampling_fields
from lopa_cuda.steps.share import Share
from lopa_cuda.steps.upload import Upload


class ReadsKey(NamedTuple):
    """The shape of a pass through the head, and what it does with the logits."""

    num_reads: int
    sampling: Sampling
    is_captured: bool


class Reads:
    """Which tokens each rank puts through the head, and where in the plan their predictions belong.

    Made while the device computes, so that little is left to do once it has answered.
    """

    def __init__(self, plan: StepPlan, shares: list[Share]) -> None:
        self._num_tokens = plan.num_tokens
        self.tokens_PM = [share.of_entries(plan.is_read_T).nonzero()[0] for share in shares]
        self.entries_PM = [share.in_plan(tokens) for share, tokens in zip(shares, self.tokens_PM, strict=True)]
        self.most = max(map(len, self.tokens_PM))

    def order(self, num_reads: int) -> PredictionOrder:
        """Of ranks that answer with `num_reads` predictions each."""
        return PredictionOrder(self._num_tokens, self.entries_PM, num_reads)


class ReadBuffers:
    """Indices of the hidden states to read, how they are drawn or changed, and the gathered predictions on the host.

    guide_M, lowered_M: StepPlan.changes_2T where the pass is special; entries that guide are counted in the plan, which
    a single branch rank computes in its order.
    """

    def __init__(self, key: ReadsKey, device: torch.device, num_ranks: int) -> None:
        is_pinned, is_random = device.type == "cuda", key.sampling.is_sampled
        self._index = Upload(torch.zeros(key.num_reads, dtype=torch.int32, pin_memory=is_pinned), device)
        shape = NUM_SAMPLING_FIELDS if is_random else 0, key.num_reads
        self._sampling = Upload(torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned), device)
        self._predicted_PM3 = torch.zeros((num_ranks, key.num_reads, 3), pin_memory=is_pinned)
        self.predicted_PM3 = self._predicted_PM3.numpy()
        self.index_M = self._index.device
        self.sampling_rows = SamplingRows.of(self._sampling.device) if is_random else None
        shape = 2 if key.sampling.is_special else 0, key.num_reads
        self._changes = Upload(torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned), device)
        if key.sampling.is_special:
            self.guide_M, self.lowered_M = self._changes.device.unbind()

    def fill(self, plan: StepPlan, reads: Reads, rank: int) -> None:
        tokens_M, entries_M = reads.tokens_PM[rank], reads.entries_PM[rank]
        self._index.host[: len(tokens_M)] = tokens_M
        self._index.host[len(tokens_M) :] = 0
        if plan.sampling_3R is not None:
            row_M = plan.first_R.searchsorted(entries_M, side="right") - 1
            self._sampling.host[:] = sampling_fields(
                plan.sampling_3R[:, row_M], plan.noise_key_R[row_M], plan.step_R[row_M],
                plan.position_T[entries_M] + 1, self._sampling.host.shape[1],
            )  # fmt: skip

        if plan.changes_2T is not None:
            self._changes.host[:, : len(tokens_M)] = plan.changes_2T[:, entries_M]

    def send(self) -> None:
        self._index.send()
        if self._changes.host.size:
            self._changes.send()
        if self.sampling_rows is not None:
            self._sampling.send()

    def receive(self, predicted_PM3: Tensor) -> None:
        """Copy to the host; it is there once the device has come this far."""
        self._predicted_PM3.copy_(predicted_PM3, non_blocking=True)
