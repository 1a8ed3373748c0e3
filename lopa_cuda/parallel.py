"""Collectives of a step, by axis: predictions are gathered over bp, committed KV is broadcast over bp, sums and head
statistics go over tp. With one rank on an axis they cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.launch import Mesh

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


@dataclass(frozen=True, slots=True)
class Collectives:
    """tp_sum: the sum over the tensor-parallel ranks; may overwrite its argument."""

    mesh: Mesh
    tp_sum: Callable[[Tensor], Tensor]

    def tp_stack(self, x: Tensor) -> Tensor:
        """[...] of every tensor-parallel rank -> [tp, ...]."""
        return _stack(x, self.mesh.tp_size, self.mesh.tp_group)

    def bp_stack(self, x: Tensor) -> Tensor:
        """[...] of every branch-parallel rank -> [bp, ...]."""
        return _stack(x, self.mesh.bp_size, self.mesh.bp_group)

    def bp_broadcast(self, x: Tensor, owner: int) -> None:
        """Overwrite x with the owner's, in place."""
        dist.broadcast(x, group=self.mesh.bp_group, group_src=owner)


def _stack(x: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x.unsqueeze(0)
    stacked = torch.empty((size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    _all_gather(stacked, x.contiguous(), group=group)
    return stacked.view(size, *x.shape)
