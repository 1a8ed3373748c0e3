"""The buffers of one pass through the head: which hidden states it reads.

Reads are padded to the shape of the buffers; a padding read repeats the first token.

Shapes: M reads of a rank.
"""

from __future__ import annotations

import torch

from common import runtime
from common.decoding import Int, StepPlan
from common.runtime import ReadsKey, Upload


class ReadBuffers(runtime.ReadBuffers):
    """index_M: tokens whose hidden states are read.

    guide_M, lowered_M: StepPlan.changes_2T where the pass is special; entries that guide are counted in the plan, which
    a single branch rank computes in its order.
    """

    def __init__(self, key: ReadsKey, device: torch.device, num_ranks: int) -> None:
        self._index = Upload(key.num_reads, device)
        self.index_M = self._index.device
        super().__init__(key, device, num_ranks)
        self._changes = Upload((2 if key.sampling.is_special else 0, key.num_reads), device)
        if key.sampling.is_special:
            self.guide_M, self.lowered_M = self._changes.device.unbind()

    def fill(self, plan: StepPlan, tokens_M: Int, entries_M: Int) -> None:
        """Take this rank's reads. tokens_M: counted in its share; entries_M: the same in the plan."""
        self._index.host[: len(tokens_M)] = tokens_M
        self._index.host[len(tokens_M) :] = 0
        self.fill_sampling(plan, entries_M)
        if plan.changes_2T is not None:
            self._changes.host[:, : len(tokens_M)] = plan.changes_2T[:, entries_M]

    def send(self) -> None:
        self._index.send()
        if self._changes.host.size:
            self._changes.send()
        if self.sampling_rows is not None:
            self._sampling.send()
