"""Collectives of a step, by axis: sums and head statistics go over tp, predictions and keys and values over bp. With
one rank on an axis they cost nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.processes import Mesh

# torch 2.13 renames the first to the second, and warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Collectives:
    mesh: Mesh

    def least(self, value: int) -> int:
        """The smallest of all ranks' values: what every rank of a replica must agree on. Over the host's network."""
        if self.mesh.world_size == 1:
            return value
        found = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found.item())

    def tp_sum(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks; may overwrite its argument."""
        if self.mesh.tp_group is not None:
            dist.all_reduce(x, group=self.mesh.tp_group)
        return x

    def tp_stack(self, x: Tensor) -> Tensor:
        """[...] of every tensor-parallel rank -> [tp, ...]."""
        return _stack(x, self.mesh.tp_size, self.mesh.tp_group)

    def bp_stack(self, x: Tensor) -> Tensor:
        """[...] of every branch-parallel rank -> [bp, ...]."""
        return _stack(x, self.mesh.bp_size, self.mesh.bp_group)

    def bp_fill(self, x: Tensor) -> None:
        """x is as many equal parts, one after another, as there are branch-parallel ranks, each of which has written
        its own: fetch the others', in place."""
        if self.mesh.bp_group is not None:
            _all_gather(x, x.chunk(self.mesh.bp_size)[self.mesh.bp_rank], group=self.mesh.bp_group)

    def bp_broadcast(self, x: Tensor, owner: int) -> None:
        """Overwrite x with the owner's, in place."""
        dist.broadcast(x, group=self.mesh.bp_group, group_src=owner)


def _stack(x: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x.unsqueeze(0)
    stacked = torch.empty((size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    _all_gather(stacked, x.contiguous(), group=group)
    return stacked.view(size, *x.shape)
