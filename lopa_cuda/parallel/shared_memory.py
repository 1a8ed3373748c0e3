"""Tensors that all ranks of a group on one host can read and write."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def share_tensor(
    group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: int = 0
) -> tuple[Tensor, Tensor]:
    """Make this rank's tensor, filled, and return it with the int64 addresses of all ranks' tensors, on the device.
    Collective: on return all tensors are filled and may be written.

    Raises RuntimeError where the devices cannot map one another's memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(shape, dtype=dtype, device=device).fill_(fill)
    handle = symmetric_memory.rendezvous(own, group)
    ranks = range(dist.get_world_size(group))
    addresses = [handle.get_buffer(rank, shape, dtype).data_ptr() for rank in ranks]
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return own, torch.tensor(addresses, dtype=torch.int64, device=device)


def is_power_of_two(count: int) -> bool:
    """Whether kernels take this number of ranks."""
    return count & (count - 1) == 0
