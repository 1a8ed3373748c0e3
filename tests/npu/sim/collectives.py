"""HCCL collectives on npu tensors, run by gloo: by the gloo half of a "cpu:gloo,npu:hccl" group, or beside a group of
HCCL alone by one of gloo with the same ranks, which all of them make at the group's first collective.

As HCCL's manual has it, a capture runs no collective, and a captured one pairs with the same one of the same capture on
all ranks, and with nothing else: where a device would hang, all ranks raise SimulationError. Unless HCCL_DETERMINISTIC
asks for one order, each rank sums in an order of its own, rounded after every addend: the most that may differ.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_flatten

from graphs.hccl import sums_in_one_order
from sim.calls import Call, SimulationError, host_view, is_npu, rebuild

_TIMEOUT = timedelta(minutes=5)
_NAME_BYTES = 128
_twins: dict[str, dist.ProcessGroup] = {}
# Collectives of a group that have run outside of graphs: since all ranks take part, it tells one capture from another.
_num_run: Counter[str] = Counter()


def is_collective(call: Call) -> bool:
    return call.func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in call.name


def capture(call: Call, index: int) -> Any:
    """What a captured one gives: its first argument, which stays as it is, and a handle that waits for nothing. index:
    among the capture's collectives."""
    mark(call, index)
    return call.args[0], FakeWork().boxed()


def mark(call: Call, index: int) -> None:
    """Note which collective of which capture the call is."""
    group = group_of(call)
    call.captured_as = f"collective {index} of the graph captured after {_num_run[group.group_name]} eager ones"


def run(call: Call) -> Any:
    """Async handles are real gloo work objects."""
    if call.name == "c10d::allreduce_" and not sums_in_one_order(os.environ) and call.args[0][0].is_floating_point():
        _sum_in_own_order(call)
        return call.args[0], FakeWork().boxed()
    back: dict[int, Tensor] = {}

    def to_host(leaf: Any) -> Any:
        if is_npu(leaf):
            view = host_view(leaf)
            back[id(view)] = leaf
            return view
        if _is_group(leaf):
            return twin_of(dist.ProcessGroup.unbox(leaf)).boxed()
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "npu" else leaf

    args, kwargs = call.mapped(to_host)
    leaves, structure = tree_flatten(call.func(*args, **kwargs))
    return rebuild([back.get(id(leaf), leaf) for leaf in leaves], structure)


def _sum_in_own_order(call: Call) -> None:
    group = group_of(call)
    (mine,) = map(host_view, call.args[0])
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    first = group.rank()
    mine.copy_(reduce(torch.add, parts[first:] + parts[:first]))


def pair(call: Call) -> None:
    """Compare notes with the peers. Raises SimulationError."""
    group = group_of(call)
    if call.captured_as is None:
        _num_run[group.group_name] += 1
    mine = f"{call.name}, {call.captured_as or 'eager'}"
    text = torch.tensor(list(mine.encode().ljust(_NAME_BYTES)[:_NAME_BYTES]), dtype=torch.uint8)
    found = [torch.empty_like(text) for _ in range(group.size())]
    dist.all_gather(found, text, group=group)
    told = [bytes(one.tolist()).decode().strip() for one in found]
    if len(set(told)) > 1:
        by_rank = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(told))
        raise SimulationError(f"collectives that do not pair, a device would hang: {by_rank}")


def group_of(call: Call) -> dist.ProcessGroup:
    """The gloo group that stands for the call's."""
    boxed = next((leaf for leaf in call.leaves if _is_group(leaf)), None)
    if boxed is not None:
        return twin_of(dist.ProcessGroup.unbox(boxed))
    named = _named_group(next(leaf for leaf in reversed(call.leaves) if isinstance(leaf, str)))
    assert named is not None, "a functional collective names its group"
    return twin_of(named)


def twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if dist.get_backend(group) != "hccl":
        return group
    name = group.group_name
    if name not in _twins:
        ranks = dist.get_process_group_ranks(group)
        _twins[name] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, timeout=_TIMEOUT)
    return _twins[name]


def name_on_host(leaf: Any) -> Any:
    """A functional collective names its group."""
    group = _named_group(leaf) if isinstance(leaf, str) and dist.is_initialized() else None
    return leaf if group is None else twin_of(group).group_name


def _named_group(wanted: str) -> dist.ProcessGroup | None:
    groups = dist.distributed_c10d._world.pg_names
    return next((group for group, name in groups.items() if name == wanted), None)


def _is_group(leaf: Any) -> bool:
    return isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
