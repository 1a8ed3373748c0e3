"""HCCL collectives on npu tensors, run by gloo: by the gloo half of a "cpu:gloo,npu:hccl" group, or beside a group of
HCCL alone by one of gloo with the same ranks, which all of them make at the group's first collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sim.calls import Call, host_view, is_npu, rebuild

_twins: dict[str, dist.ProcessGroup] = {}


def run(call: Call, on_copies: bool = False) -> Any:
    """Async handles are real gloo work objects. on_copies: all ranks take part, but their tensors stay as they are."""
    back: dict[int, Tensor] = {}

    def to_host(leaf: Any) -> Any:
        if is_npu(leaf):
            view = host_view(leaf).clone() if on_copies else host_view(leaf)
            back[id(view)] = leaf
            return view
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return twin_of(dist.ProcessGroup.unbox(leaf)).boxed()
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "npu" else leaf

    args, kwargs = call.mapped(to_host)
    leaves, structure = tree_flatten(call.func(*args, **kwargs))
    return rebuild([back.get(id(leaf), leaf) for leaf in leaves], structure)


def twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if dist.get_backend(group) != "hccl":
        return group
    name = group.group_name
    if name not in _twins:
        ranks = dist.get_process_group_ranks(group)
        _twins[name] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _twins[name]


def name_on_host(leaf: Any) -> Any:
    """A functional collective names its group."""
    if not isinstance(leaf, str) or not dist.is_initialized():
        return leaf
    groups = dist.distributed_c10d._world.pg_names
    group = next((group for group, name in groups.items() if name == leaf), None)
    return leaf if group is None else twin_of(group).group_name
