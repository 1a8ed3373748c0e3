"""Staging memory that the branch-parallel ranks of one host write for one another: what a rank computes of a cut pass
(lopa_cuda.steps.slices) it stores on all of them, layer by layer, and nothing has to be gathered.

Gathers by NCCL took two launches a layer that overlap with nothing. Here the stage that rotates and stores keys and
values writes to every rank, and one program meets the others' before attention. NVLink multicast is not used.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from lopa_cuda import kernels
from lopa_cuda.parallel.agreement import built_by_all
from lopa_cuda.parallel.shared_memory import is_power_of_two, share_tensor

logger = logging.getLogger(__name__)


class PeerStaging:
    """Made by all ranks of a group together. staging: this rank's memory, layers first, zero at first.

    A pass over it: `begin`, then for each layer writes to `mirrors`, `meet`, and reads.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Raises RuntimeError where the devices cannot map one another's memory."""
        self._rank = dist.get_rank(group)
        self.staging, self._addresses_P = share_tensor(group, shape, dtype, device)
        places = 1 + shape[0], dist.get_world_size(group)  # the beginning of a pass, and each layer
        self._flags, self._flags_P = share_tensor(group, places, torch.int32, device)

    def mirrors(self, part: Tensor) -> kernels.Mirrors:
        """Where all ranks have this part of the memory."""
        return kernels.Mirrors(self._addresses_P, part.storage_offset() - self.staging.storage_offset())

    def begin(self) -> None:
        """Wait until every rank is here: what its last pass left has been copied, and may be written over."""
        kernels.meet(self._flags_P, 0, self._rank)

    def meet(self, layer: int) -> None:
        """Wait until every rank has written this layer."""
        kernels.meet(self._flags_P, 1 + layer, self._rank)


def build_peer_staging(
    group: dist.ProcessGroup | None, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> PeerStaging | None:
    """Collective over the group. None without branch parallelism, for a number of ranks that is no power of two, or
    where memory cannot be shared: ranks gather then."""
    if group is None or not is_power_of_two(dist.get_world_size(group)):
        return None
    staging, reason = built_by_all(group, lambda: PeerStaging(group, device, shape, dtype))
    if staging is None:
        logger.info("ranks gather the keys and values of a shared prompt: %s", reason)
    return staging
