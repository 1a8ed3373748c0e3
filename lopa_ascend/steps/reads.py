"""The buffers of one pass through the head."""

from __future__ import annotations

import torch

from common import runtime
from common.decoding import Int, StepPlan
from common.runtime import ReadsKey


class ReadBuffers(runtime.ReadBuffers):
    """hidden_MD: the states that go through the head. gathered_PM3: what comes of them, of all branch ranks, on the
    device."""

    def __init__(
        self, key: ReadsKey, device: torch.device, num_ranks: int, width: int, dtype: torch.dtype
    ) -> None:  # fmt: skip
        self.hidden_MD = torch.zeros((key.num_reads, width), dtype=dtype, device=device)
        self.gathered_PM3 = torch.zeros((num_ranks, key.num_reads, 3), device=device)
        super().__init__(key, device, num_ranks)
        if self.sampling_rows is not None:
            self._sampling.host[:] = 1  # a capture draws by these
            self._sampling.send()

    def send_sampling(self, plan: StepPlan, entry_M: Int) -> None:
        """Send how these entries of the plan are drawn, if any is."""
        if self.sampling_rows is not None:
            self.fill_sampling(plan, entry_M)
            self._sampling.send()
