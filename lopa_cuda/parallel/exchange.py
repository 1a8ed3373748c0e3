"""Memory in which tensor-parallel ranks put the addends of their row-parallel linears, for the next norm to sum.

An all_reduce of its own would copy, signal, sum, signal and write between two kernels that read and write the same
values anyway. Here the linear writes where the peers can read, and the norm waits for their flags and reads all
addends: one launch and one exchange in place of three and two. NVLink multicast is not used.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from lopa_cuda.kernels import Shared
from lopa_cuda.machine import MACHINE
from lopa_cuda.parallel.agreement import built_by_all
from lopa_cuda.parallel.shared_memory import is_power_of_two, share_tensor

logger = logging.getLogger(__name__)

# A peer may still read one while this rank fills the next; sums alternate, and a pass has an even number.
_NUM_BUFFERS = 2


class Exchange:
    """Buffers and flags of one tensor-parallel group, made by all of its ranks together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, width: int) -> None:
        """Raises RuntimeError where the devices cannot map one another's memory."""
        self._rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        limits = MACHINE.exchange
        most = self.max_tokens = limits.tokens_of_two_ranks if size == 2 else limits.tokens_of_more
        self._buffers = [share_tensor(group, (most, width), torch.bfloat16, device) for _ in range(_NUM_BUFFERS)]
        self._flags = [share_tensor(group, (most, size), torch.int32, device) for _ in range(_NUM_BUFFERS)]
        self._next = 0

    def next(self, num_tokens: int) -> Shared | None:
        """Room for an addend of so many tokens, None if that is too many. Its content lasts until the sum after the
        next is written."""
        if num_tokens > self.max_tokens:
            return None
        (buffer, addends_P), (_, flags_P) = self._buffers[self._next], self._flags[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        return Shared(buffer[:num_tokens], addends_P, flags_P, self._rank)


def build_exchange(group: dist.ProcessGroup | None, device: torch.device, width: int) -> Exchange | None:
    """Collective over the group. None without tensor parallelism, for a number of ranks that is no power of two, or
    where memory cannot be shared, which `all_reduce` has said."""
    if group is None or not is_power_of_two(dist.get_world_size(group)):
        return None
    exchange, reason = built_by_all(group, lambda: Exchange(group, device, width))
    if exchange is None:
        logger.info("sums stay apart from norms: %s", reason)
    return exchange
