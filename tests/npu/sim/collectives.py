"""HCCL collectives on npu tensors, run by the gloo half of a "cpu:gloo,npu:hccl" group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sim.calls import Call, host_view, is_npu, rebuild


def run(call: Call, on_copies: bool = False) -> Any:
    """Async handles are real gloo work objects. on_copies: all ranks take part, but their tensors stay as they are."""
    back: dict[int, Tensor] = {}

    def to_host(leaf: Any) -> Any:
        if is_npu(leaf):
            view = host_view(leaf).clone() if on_copies else host_view(leaf)
            back[id(view)] = leaf
            return view
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "npu" else leaf

    args, kwargs = call.mapped(to_host)
    leaves, structure = tree_flatten(call.func(*args, **kwargs))
    return rebuild([back.get(id(leaf), leaf) for leaf in leaves], structure)
