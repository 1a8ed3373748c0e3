"""Collectives of ranks on one node: sums over tp, by size one-shot and two-shot in symmetric memory, else by NCCL.
Small tensors of tp are stacked through inboxes (lopa_cuda.parallel.exchange), others by NCCL.

A layer has two sums of a few hundred KB: latency decides. One-shot (every rank reads all peers) has one exchange
less, two-shot (every rank sums its share and writes it to all) moves fewer bytes. NVLink multicast is not used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from common.processes import Mesh
from common.runtime import Collectives
from lopa_cuda.machine import MACHINE
from lopa_cuda.parallel.agreement import built_by_all

if TYPE_CHECKING:
    from lopa_cuda.parallel.exchange import PeerStack

logger = logging.getLogger(__name__)

_NUM_BUFFERS = 2  # a rank may still read one buffer of a peer that already fills the next


class SymmetricAllReduce:
    """Sums bf16 tensors over a process group whose ranks can map one another's memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective. Raises RuntimeError where the devices cannot map one another's memory."""
        import torch.distributed._symmetric_memory as symmetric_memory

        self._name = group.group_name
        self._buffers = []
        for _ in range(_NUM_BUFFERS):
            buffer = symmetric_memory.empty(MACHINE.all_reduce.two_shot_bytes // 2, dtype=torch.bfloat16, device=device)
            symmetric_memory.rendezvous(buffer, group)
            self._buffers.append(buffer)
        self._next = 0

    def can_sum(self, x: Tensor) -> bool:
        return x.dtype == torch.bfloat16 and x.numel() * 2 <= MACHINE.all_reduce.two_shot_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum: a new tensor, or the buffer, which stays as it is until the sum after the next."""
        buffer = self._buffers[self._next][: x.numel()].view(x.shape)
        self._next = (self._next + 1) % _NUM_BUFFERS
        buffer.copy_(x)
        if x.numel() * 2 <= MACHINE.all_reduce.one_shot_bytes:
            return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._name)
        return torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self._name)


@dataclass(frozen=True, slots=True)
class CudaCollectives(Collectives):
    """What is None, or too large for it, goes over NCCL."""

    symmetric: SymmetricAllReduce | None = None
    peers: PeerStack | None = None

    def tp_sum(self, x: Tensor) -> Tensor:
        """Return the sum: a new tensor, x itself, or memory that stays as it is until the sum after the next."""
        if self.symmetric is not None and self.symmetric.can_sum(x):
            return self.symmetric(x)
        return Collectives.tp_sum(self, x)

    def tp_stack(self, x: Tensor) -> Tensor:
        if self.peers is not None and self.peers.can_stack(x):
            return self.peers(x)
        return Collectives.tp_stack(self, x)


def build_collectives(mesh: Mesh, device: torch.device) -> CudaCollectives:
    """Collective over the mesh. Says so where symmetric memory cannot be had."""
    group = mesh.tp_group
    if group is None or device.type != "cuda":
        return CudaCollectives(mesh)

    def stack() -> PeerStack:
        from lopa_cuda.parallel.exchange import PeerStack  # it needs Triton

        return PeerStack(group, device)

    symmetric, reason = built_by_all(group, lambda: SymmetricAllReduce(group, device))
    if symmetric is None:
        logger.warning("tensor parallel sums go over NCCL, without symmetric memory: %s", reason)
        return CudaCollectives(mesh)
    peers, reason = built_by_all(group, stack)
    if peers is None:
        logger.info("NCCL stacks head statistics: %s", reason)
    return CudaCollectives(mesh, symmetric, peers)
