"""What the ranks of a run tell each other in the self-test, over the hosts' network."""

from __future__ import annotations

import torch
import torch.distributed as dist

from common.errors import EngineError
from common.processes import Mesh

NEVER = float("inf")  # seconds of what does not work


def most_of_all(values: list[float], mesh: Mesh) -> list[float]:
    """Return the largest of all ranks' values, so that all choose the same. Raises EngineError."""
    if mesh.world_size == 1:
        return values
    found = torch.tensor(values, dtype=torch.float64)
    try:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    except RuntimeError as error:
        raise EngineError(f"rank {mesh.rank}: the other ranks did not answer in the self-test") from error
    return [float(value) for value in found]
