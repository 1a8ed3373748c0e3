"""One operator call as the dispatcher sees it, and zero-copy host views of its npu tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class SimulationError(RuntimeError):
    """The program would fail, hang or read garbage on a device."""


class Signature(NamedTuple):
    """What distinguishes one call from another: the operator, and shape, dtype or value of each argument in order."""

    op: str
    arguments: tuple[str, ...]


class Call:
    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = name_of(func)
        leaves, self._structure = tree_flatten((args, kwargs))
        self.leaves: list[Any] = leaves
        self.npu = [leaf for leaf in leaves if is_npu(leaf)]
        self.captured_as: str | None = None  # of a collective in a graph

    @property
    def changes_nothing(self) -> bool:
        """Answered from metadata: a view, or memory without contents."""
        return self.func.is_view or self.is_allocation or self.name in _METADATA

    @property
    def is_allocation(self) -> bool:
        return self.name in _ALLOCATIONS

    @property
    def target(self) -> torch.device | None:
        """The npu that the result is asked to be on; None without such a request."""
        device = self.kwargs.get("device")
        device = None if device is None else torch.device(device)
        return with_index(device) if device is not None and device.type == "npu" else None

    def mapped(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return rebuild([change(leaf) for leaf in self.leaves], self._structure)

    def written(self) -> Iterator[Tensor]:
        """npu tensors that the operator overwrites."""
        if self.func.namespace == "c10d":
            yield from self.npu
        elif self.name == "npu::npu_apply_rotary_pos_emb":  # in place, against its schema
            yield from self.npu[:2]
        elif self.func._schema.is_mutable:
            for index, argument in enumerate(self.func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = self.args[index] if index < len(self.args) else self.kwargs.get(argument.name)
                    yield from npu_tensors(value)

    def signature(self) -> Signature:
        named = tree_flatten(self.kwargs)[0]
        positional = self.leaves[: len(self.leaves) - len(named)]
        options = [f"{key}={_describe(value)}" for key, value in self.kwargs.items()]
        return Signature(self.name, (*map(_describe, positional), *options))


_ALLOCATIONS = {
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_METADATA = {
    "aten::detach",
    "aten::is_same_size",
    "aten::lift_fresh",
    "aten::record_stream",
    "aten::set_.source_Storage",
    "npu::get_npu_format",
}


@cache
def name_of(func: Any) -> str:
    overload = func._overloadname
    return func._schema.name + (f".{overload}" if overload not in ("", "default") else "")


def is_npu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def npu_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if is_npu(leaf)]


def rebuild(leaves: list[Any], structure: TreeSpec) -> Any:
    return tree_unflatten(leaves, structure)


def with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("npu", torch.npu.current_device())


def host_view(tensor: Tensor) -> Tensor:
    """The same memory as a cpu tensor, which keeps it alive."""
    if tensor.device.type != "npu":
        return tensor
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    window = (ctypes.c_char * size).from_address(storage.data_ptr())
    window.owner = storage
    memory = torch.frombuffer(window, dtype=torch.uint8)
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), *place)


def to_npu(tensor: Tensor, device: torch.device) -> Tensor:
    placed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        host_view(placed).copy_(tensor)
    return placed


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    return str(value)
