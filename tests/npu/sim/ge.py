"""GE graphs without GE: what torchair lowered is executed node by node, by torch_npu's own operators on the simulated
device, so that every kernel of a graph passes the same checks as a call in eager mode.

As on a device a graph is loaded, compiled and then run, its inputs have the shapes and the memory (host or device) that
it was lowered for, what was said to be frozen stays at its address, and a reference operator writes into its input.
Attention's lengths must lie on the host, where tiling needs them. Nodes run in the order of the graph's text, on one
stream; a node of a kind that the engine's graphs do not have raises NotImplementedError.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sim.calls import SimulationError, to_npu, with_index
from sim.ge_nodes import DTYPES, NODES, Node

_NO_KERNEL = ("Data", "Const", "NetOutput", "Identity", "Reshape", "Unsqueeze", "ExpandDims", "Shape")


class Graph:
    """One lowered graph. kernels: how many nodes of each kind compute something. num_runs: so far."""

    def __init__(self, proto: Any, options: dict[str, str]) -> None:
        self.nodes = [Node(op) for op in proto.op]
        self.name = proto.name
        self.options = options
        self.kernels = Counter(node.kind for node in self.nodes if node.kind not in _NO_KERNEL)
        self.num_runs = 0
        self.is_compiled = False
        self._frozen = [flag == "1" for flag in options.get("frozenInput", "").split(",")]
        self._addresses: list[int] = []

    @property
    def num_frozen(self) -> int:
        return sum(self._frozen)

    def run(self, inputs: list[Tensor], assigned: list[Tensor | None]) -> list[Tensor]:
        from sim.device import current

        if current().graphs.capture is not None:
            raise SimulationError(f"{self.name}: a GE graph is launched inside of an NPUGraph's capture")
        self._check_frozen(inputs)
        self.num_runs += 1
        values: dict[str, list[Any]] = {}
        for node in self.nodes:
            given = {name: _of(values, source) for name, source in node.inputs if source}
            if node.kind == "Data":
                values[node.name] = [_input(node, inputs)]
            elif node.kind == "NetOutput":
                return [_assign(output, place) for output, place in _paired(list(given.values()), assigned)]
            elif node.kind in NODES:
                values[node.name] = NODES[node.kind](node, given)
            else:
                raise NotImplementedError(f"GE node {node.kind} ({node.name}) is not simulated")
        raise SimulationError(f"{self.name} has no NetOutput")

    def _check_frozen(self, inputs: list[Tensor]) -> None:
        addresses = [tensor.data_ptr() for tensor, frozen in zip(inputs, self._frozen, strict=False) if frozen]
        if self._addresses and addresses != self._addresses:
            raise SimulationError(f"{self.name}: a frozen input lies somewhere else than in the first run")
        self._addresses = addresses


graphs: list[Graph] = []  # every graph compiled in this process


@cache
def install() -> None:
    """Let torchair's executor run graphs here; once per process, after torchair's import."""
    # Asks CANN's operator registry, which the stubs do not have.
    import_module("torchair._ge_concrete_graph.compat_ir").is_cann_compat = lambda *_, **__: ""
    executor = import_module("torchair.core._backend").TorchNpuGraph

    def load(self: Any, graph: Any, options: dict[str, str] | None = None) -> None:
        self.simulated = Graph(graph._proto, dict(options or {}))

    def compile_it(self: Any) -> None:
        if not hasattr(self, "simulated"):
            raise SimulationError("a GE graph is compiled before it is loaded")
        self.simulated.is_compiled = True
        graphs.append(self.simulated)

    def run(self: Any, inputs: Any, assigned_outputs: Any = (), stream: Any = None) -> list[Tensor]:
        if not getattr(getattr(self, "simulated", None), "is_compiled", False):
            raise SimulationError("a GE graph is run before it is compiled")
        outputs: list[Tensor] = self.simulated.run(list(inputs), list(assigned_outputs))
        return outputs

    executor.load, executor.compile, executor.run = load, compile_it, run


def group_of(name: str) -> dist.ProcessGroup:
    """The process group whose HCCL communicator has this name."""
    rank = dist.get_rank()
    for group in (group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == "hccl"):
        if group._get_backend(torch.device("npu")).get_hccl_comm_name(rank, init_comm=False) == name:
            return group
    raise SimulationError(f"no HCCL communicator is called {name}: a GE graph would wait for it forever")


def _of(values: dict[str, list[Any]], source: str) -> Any:
    name, _, index = source.partition(":")
    return values[name][int(index)]


def _input(node: Node, inputs: list[Tensor]) -> Tensor:
    tensor = inputs[node.attributes["index"]]
    wanted = node.outputs[0]
    device = "npu" if wanted.device_type == "NPU" else "cpu"
    if (list(tensor.shape), tensor.dtype, tensor.device.type) != (wanted.shape, DTYPES[wanted.dtype], device):
        raise SimulationError(
            f"input {node.name} is {tensor.dtype}{list(tensor.shape)} on {tensor.device.type}, the graph was lowered "
            f"for {wanted.dtype}{wanted.shape} on {device}"
        )
    if not tensor.is_contiguous():
        raise SimulationError(f"input {node.name} is not contiguous")
    return tensor


def _paired(outputs: list[Any], assigned: list[Tensor | None]) -> list[tuple[Any, Tensor | None]]:
    return list(zip(outputs, assigned or [None] * len(outputs), strict=True))


def _assign(output: Tensor, place: Tensor | None) -> Tensor:
    if output.device.type != "npu":
        output = to_npu(output, with_index(torch.device("npu")))
    return output if place is None else place.copy_(output)
