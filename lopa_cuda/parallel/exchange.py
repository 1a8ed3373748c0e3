"""Inboxes in which ranks of one host write for one another: addends that the next norm sums, small tensors to stack.

A rank writes to its peers' inboxes and looks at its own until all of it is there: data says by itself that it has come,
as nothing that is sent has the bits of an empty inbox. A flag would have to follow the data, and to read a peer's
memory takes two trips over the link instead of one. NVLink multicast is not used.
"""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist
from torch import Tensor

from lopa_cuda import kernels
from lopa_cuda.machine import MACHINE
from lopa_cuda.parallel.agreement import built_by_all
from lopa_cuda.parallel.shared_memory import share_tensor

logger = logging.getLogger(__name__)

# A peer may still read one while this rank's addends fill the next; sums alternate, and a pass has an even number.
_NUM_INBOXES = 2


class Exchange:
    """Inboxes of one tensor-parallel group for the sums inside norms, made by all of its ranks together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, width: int) -> None:
        """Raises RuntimeError where the devices cannot map one another's memory."""
        self._rank = dist.get_rank(group)
        size, limits = dist.get_world_size(group), MACHINE.exchange
        self.max_tokens = limits.tokens_of_two_ranks if size == 2 else limits.tokens_of_more
        self._stride = self.max_tokens * width
        shape = size, self.max_tokens, width
        self._inboxes = [_inbox(group, shape, torch.int16, device) for _ in range(_NUM_INBOXES)]
        self._next = 0

    def next(self, x: Tensor | kernels.Partials) -> kernels.Shared | None:
        """This rank's addend for the next norm to sum; None if it has too many tokens."""
        values = x if isinstance(x, Tensor) else x.values
        if values.shape[-2] > self.max_tokens:
            return None
        _, inboxes_P = self._inboxes[self._next]
        self._next = (self._next + 1) % _NUM_INBOXES
        return kernels.Shared(x, inboxes_P, self._stride, self._rank)


class PeerStack:
    """Stacks small float32 tensors of a group's ranks, such as head statistics, in one launch."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective. Raises RuntimeError where the devices cannot map one another's memory."""
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        most = MACHINE.exchange.stacked_values
        shape = _NUM_INBOXES, size, most
        self._inbox, self._inboxes_P = _inbox(group, shape, torch.int32, device)
        self._turns = torch.zeros(math.ceil(most / kernels.STACK_BLOCK), dtype=torch.int32, device=device)

    def can_stack(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 and x.numel() <= MACHINE.exchange.stacked_values

    def __call__(self, x: Tensor) -> Tensor:
        """[...] of every rank -> [P, ...]."""
        return kernels.stack_of_ranks(x.contiguous(), self._inboxes_P, self._inbox.stride(1), self._turns, self._rank)


def build_exchange(group: dist.ProcessGroup | None, device: torch.device, width: int) -> Exchange | None:
    """Collective over the group. None without tensor parallelism, or where memory cannot be shared, which `all_reduce`
    has said."""
    if group is None:
        return None
    exchange, reason = built_by_all(group, lambda: Exchange(group, device, width))
    if exchange is None:
        logger.info("sums stay apart from norms: %s", reason)
    return exchange


def _inbox(
    group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    return share_tensor(group, shape, dtype, device, kernels.EMPTY.value)
