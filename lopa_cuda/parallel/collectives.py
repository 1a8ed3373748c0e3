"""Collectives of a step, by axis: predictions are gathered over bp, committed KV is broadcast over bp, sums and head
statistics go over tp. With one rank on an axis they cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from common.runtime import Gathers


@dataclass(frozen=True, slots=True)
class Collectives(Gathers):
    """tp_sum: the sum over the tensor-parallel ranks; may overwrite its argument."""

    tp_sum: Callable[[Tensor], Tensor]

    def bp_broadcast(self, x: Tensor, owner: int) -> None:
        """Overwrite x with the owner's, in place."""
        dist.broadcast(x, group=self.mesh.bp_group, group_src=owner)
