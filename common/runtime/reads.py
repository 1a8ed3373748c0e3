"""What goes through the head: the shape of such a pass, and those of its buffers that every engine has."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.decoding import Int, Sampling, StepPlan
from common.model import NUM_SAMPLING_FIELDS, SamplingRows, sampling_fields
from common.runtime.upload import Upload


class ReadsKey(NamedTuple):
    """The shape of a pass through the head, and what it does with the logits."""

    num_reads: int
    sampling: Sampling
    is_captured: bool


def drawn_fields(plan: StepPlan, entry_M: Int, num_rows: int) -> npt.NDArray[np.int32]:
    """Return how the predictions of these entries of a plan that draws are drawn, as `sampling_fields` does."""
    assert plan.sampling_3R is not None, "the caller has looked"
    row_M = plan.first_R.searchsorted(entry_M, side="right") - 1
    return sampling_fields(
        plan.sampling_3R[:, row_M], plan.noise_key_R[row_M], plan.step_R[row_M], plan.position_T[entry_M] + 1, num_rows
    )


class ReadBuffers:
    """How the states are drawn that go through the head, and what comes of them, of all branch ranks, on the host.

    sampling_rows: as the head takes them; None where every read takes its most probable token.
    """

    def __init__(self, key: ReadsKey, device: torch.device, num_ranks: int) -> None:
        is_sampled = key.sampling.is_sampled
        self._sampling = Upload((NUM_SAMPLING_FIELDS if is_sampled else 0, key.num_reads), device)
        self._predicted = torch.zeros(
            (num_ranks, key.num_reads, key.sampling.num_values), pin_memory=device.type != "cpu"
        )
        self.predicted_PM3 = self._predicted.numpy()
        self.sampling_rows = SamplingRows.of(self._sampling.device) if is_sampled else None

    def fill_sampling(self, plan: StepPlan, entry_M: Int) -> None:
        """Write how the predictions of these entries of the plan are drawn, where any is."""
        if plan.sampling_3R is None:
            return
        self._sampling.host[:] = drawn_fields(plan, entry_M, self._sampling.host.shape[1])

    def receive(self, predicted_PM3: torch.Tensor) -> None:
        """Copy to the host; it is there once the device has come this far."""
        self._predicted.copy_(predicted_PM3, non_blocking=True)
