"""Collectives of a step, by axis: sums and head statistics go over tp, predictions over bp. With one rank on an axis
they cost nothing. Under block-causal attention no KV is ever sent."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from common.runtime import Gathers


class Collectives(Gathers):
    __slots__ = ()

    def tp_sum(self, x: Tensor) -> Tensor:
        """In place."""
        if self.mesh.tp_group is not None:
            dist.all_reduce(x, group=self.mesh.tp_group)
        return x
