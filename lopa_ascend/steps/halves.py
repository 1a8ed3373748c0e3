"""The two halves of a pass as modules: what a graph compiler is given, and what runs as it is without one.

Between them lie only the hidden states that are read, so each half is compiled at its own shapes: branch ranks may run
layers of different sizes, while the head, which gathers over bp, has one size on all of them.
"""

from __future__ import annotations

from torch import Tensor, nn

from common.decoding import Sampling
from common.model import Decoder, SamplingRows, best_statistics, merge_statistics, sampled_statistics, shard_statistics
from common.runtime import Collectives
from lopa_ascend.kv import PagedKVCache
from lopa_ascend.ops import VirtualRows
from lopa_ascend.stages import AttendStep, RotaryTable
from lopa_ascend.steps.step import DeviceStep


class Layers(nn.Module):
    """Computes the hidden states after the last norm from token ids, and writes the window's KV on the way."""

    def __init__(self, model: Decoder, rotary: RotaryTable, cache: PagedKVCache) -> None:
        super().__init__()
        self.model = model
        self.rotary = rotary
        self.cache = cache

    def forward(self, step: DeviceStep, rows: VirtualRows) -> Tensor:
        """Hidden states [T, D]."""
        cos_T1H, sin_T1H = self.rotary.at(step.position_T)
        hidden_TD: Tensor = self.model(step.token_T, AttendStep(cos_T1H, sin_T1H, step.slot_T, rows, self.cache))
        return hidden_TD


class Head(nn.Module):
    """Computes predictions from hidden states, each of the most probable token."""

    def __init__(self, model: Decoder, collectives: Collectives, sampling: Sampling) -> None:
        super().__init__()
        self.lm_head = model.lm_head
        self.ops = model.ops
        self.vocab_start = model.vocab_start
        self.collectives = collectives
        self.sampling = sampling

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Token, probability and confidence of all branch ranks, float32 [bp, M, 3]."""
        logits_MV = self.ops.linear(hidden_MD, self.lm_head)
        statistics_M6 = shard_statistics(logits_MV, self.vocab_start, self.sampling)
        stacked_PM6 = self.collectives.tp_stack(statistics_M6)
        return self.collectives.bp_stack(merge_statistics(stacked_PM6, self.sampling.strategy))


class SampledHead(Head):
    """The same where some reads are drawn."""

    def forward(self, hidden_MD: Tensor, rows: SamplingRows) -> Tensor:  # type: ignore[override]
        """The same; rows says how each state is drawn."""
        logits_MV = self.ops.linear(hidden_MD, self.lm_head)
        stack = self.collectives.tp_stack
        predicted_M3 = sampled_statistics(logits_MV, self.vocab_start, self.sampling, rows, stack)
        return self.collectives.bp_stack(predicted_M3)


class BestHead(Head):
    """The same where a rule looks at the best of several tokens."""

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """What `best_statistics` gives, of all branch ranks, float32 [bp, M, 3 + 2 C]."""
        logits_MV = self.ops.linear(hidden_MD, self.lm_head)
        best_MX = best_statistics(logits_MV, self.vocab_start, self.sampling, self.collectives.tp_stack)
        return self.collectives.bp_stack(best_MX)
