"""SimulatedNpu: executes every operator that meets npu tensors, and keeps account of what was executed."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lopa_ascend.ops import reference_ops, side_stream
from sim import collectives, contract, graph, table, traffic
from sim.calls import (
    Call,
    Signature,
    SimulationError,
    host_view,
    is_npu,
    name_of,
    npu_tensors,
    rebuild,
    to_npu,
    with_index,
)
from sim.nz import FRACTAL_NZ, NZ

_thread = threading.local()
# Host tensors that may index npu tensors.
_MAY_MIX = ("aten::index", "aten::_index")


def current() -> SimulatedNpu:
    stack = getattr(_thread, "stack", [])
    if not stack:
        raise SimulationError("no SimulatedNpu is active in this thread")
    return stack[-1]


class SimulatedNpu(TorchDispatchMode):
    """Active in the thread that enters it. Outside, an npu operator fails with an absurd "NPU out of memory".

    counts: executed operators. signatures: distinct npu:: calls, each checked against torch_npu's meta kernel.
    stream: with record=True every executed call in order. traffic: likewise, the bytes that each of them moves.
    """

    def __init__(self, record: bool = False) -> None:
        super().__init__()
        graph.install()
        self.counts: Counter[str] = Counter()
        self.signatures: set[Signature] = set()
        self.stream: list[Signature] = []
        self.traffic: list[traffic.Traffic] = []
        self.graphs = graph.GraphState()
        self._record = record

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Part of the machine: without this torch.compile quietly runs everything eagerly."""
        return True

    def __enter__(self) -> SimulatedNpu:
        _thread.stack = [*getattr(_thread, "stack", []), self]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _thread.stack = _thread.stack[:-1]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(func) in side_stream.KERNELS:  # the engine's own: what it runs are a device's
            with self:
                return side_stream.KERNELS[name_of(func)](*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {})
        if self.graphs.update is not None and call.npu and not func.is_view:
            return self.graphs.update.take(call)
        self.graphs.refuse_if_blocked(call)
        capture = self.graphs.capture
        return self.execute(call) if capture is None else capture.run(call)

    def execute(self, call: Call) -> Any:
        if not call.npu and call.target is None:
            return call.func(*call.args, **call.kwargs)
        NZ.check(call)
        if call.name == "npu::get_npu_format" and call.npu[0] in NZ:
            return FRACTAL_NZ
        if call.changes_nothing:
            return call.func(*call.args, **call.kwargs)
        self.counts[call.name] += 1
        if not self._record:
            return self._carry_out(call)
        self.stream.append(call.signature())
        result = self._carry_out(call)
        self.traffic.append(traffic.of(call, result))
        return result

    def _carry_out(self, call: Call) -> Any:
        if collectives.is_collective(call):
            collectives.pair(call)
        if call.func.namespace == "c10d":
            return collectives.run(call)
        if call.name == "aten::_to_copy":
            return _to_copy(call)
        if call.name == "aten::copy_":
            host_view(call.args[0]).copy_(host_view(call.args[1]))
            return call.args[0]
        return self._compute(call)

    def _compute(self, call: Call) -> Any:
        device = _common_device(call)
        back: dict[int, Tensor] = {}

        def to_host(leaf: Any) -> Any:
            if is_npu(leaf):
                view = host_view(leaf)
                back[id(view)] = leaf
                return view
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "npu" else leaf

        args, kwargs = call.mapped(to_host)
        result = self._run_on_host(call, args, kwargs)
        leaves, structure = tree_flatten(result)
        placed = [
            back[id(leaf)] if id(leaf) in back else to_npu(leaf, device) if _is_cpu(leaf) else leaf for leaf in leaves
        ]
        if call.name == "npu::npu_format_cast":
            NZ.add(placed[0])
        return rebuild(placed, structure)

    def _run_on_host(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.func.namespace in ("npu", "atb"):
            result = table.execute(call.name, args, kwargs)
            signature = call.signature()
            if signature not in self.signatures:
                contract.check(call, result)
                self.signatures.add(signature)
            return result
        if call.name == "lopa::rotate_and_write":  # a Triton kernel of the engine's: its twin
            qkv, cos, sin, keys, values, slot, num_heads = args
            return reference_ops().rotate_and_write(qkv.clone(), cos, sin, num_heads, keys, values, slot)
        if torch.Tag.nondeterministic_seeded in call.func.tags:
            raise NotImplementedError(f"{call.name}: random numbers of an npu are not simulated; draw them on the cpu")
        kwargs.pop("pin_memory", None)
        if call.func.namespace == "_c10d_functional":
            args = tuple(collectives.name_on_host(leaf) for leaf in args)
        result = call.func(*args, **kwargs)
        if call.func.namespace == "_c10d_functional" and "wait_tensor" not in call.name:
            for leaf in tree_flatten(result)[0]:
                torch.ops._c10d_functional.wait_tensor.default(leaf)
        return result


def _common_device(call: Call) -> torch.device:
    """Where the result lives. Raises SimulationError for tensors on several devices."""
    device = call.npu[0].device if call.npu else call.target
    assert device is not None
    if any(tensor.device != device for tensor in call.npu):
        raise SimulationError(f"{call.name}: tensors on {sorted({str(tensor.device) for tensor in call.npu})}")
    if call.npu and not call.name.startswith(_MAY_MIX):
        for leaf in call.leaves:
            if _is_cpu(leaf) and (leaf.dim() > 0 or call.func.namespace == "npu"):
                raise SimulationError(f"{call.name}: a cpu tensor {list(leaf.shape)} among tensors on {device}")
    return device


def _to_copy(call: Call) -> Tensor:
    source = call.args[0]
    wanted = call.kwargs.get("device")
    device = source.device if wanted is None else torch.device(wanted)
    copied = host_view(source).to(call.kwargs.get("dtype") or source.dtype, copy=True)
    memory_format = call.kwargs.get("memory_format")
    if memory_format is not None and memory_format is not torch.preserve_format:
        copied = copied.contiguous(memory_format=memory_format)
    return to_npu(copied, with_index(device)) if device.type == "npu" else copied.to(device)


def _is_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"


__all__ = ["SimulatedNpu", "SimulationError", "current", "npu_tensors"]
