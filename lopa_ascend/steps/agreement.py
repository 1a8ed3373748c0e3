"""One answer of all ranks about each capture. HCCL pairs a captured graph's collectives with the same capture on the
peers and with nothing else, so where one rank's device refuses a graph its peers run that shape as it is, too.

The layers' graphs hold collectives of a tensor-parallel group, the head's those of the whole replica.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import LOST_PEER, EngineError, first_line
from common.processes import Mesh, host_group
from graphs.runner import Agree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def agreements(mesh: Mesh, timeout_s: float) -> tuple[Agree, Agree]:
    """Return what the ranks of a tp group agree by, and those of a replica; every rank of the run calls it.

    timeout_s: how long one may capture while the others wait.
    """
    agree_on_layers = _agree_among(mesh, mesh.tp_size, timeout_s)
    return agree_on_layers, _agree_among(mesh, mesh.tp_size * mesh.bp_size, timeout_s)


def _agree_among(mesh: Mesh, num_ranks: int, timeout_s: float) -> Agree:
    if num_ranks == 1:
        return bool
    group = host_group(num_ranks, timedelta(seconds=timeout_s))
    return lambda is_captured: _least(is_captured, group, mesh.rank)


def _least(is_captured: bool, group: ProcessGroup, rank: int) -> bool:
    found = torch.tensor([is_captured], dtype=torch.int32)
    try:
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:
        raise EngineError(f"rank {rank}, after a capture: {LOST_PEER} ({first_line(error)})") from error
    return bool(found.item())
