"""What the graph compilers make of a layer: one fused kernel an operation, no copy of the size of the KV cache. A whole
step in GE: test_npu_torchair.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from branches import CASES, Branch, Layout, lay_out
from layer import TINY, Inputs, Weights, draw_inputs, draw_weights, run_layer
from torch import Tensor

from lopa_ascend.ops import (
    AttentionForm,
    AttentionVersion,
    Ops,
    VirtualRows,
    keep_kv_writes_in_place,
    npu_ops,
    reference_ops,
)

pytestmark = [
    pytest.mark.sim,
    # An .out overload returns what it was given.
    pytest.mark.filterwarnings("ignore:.*output of this custom operator"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method"),
]

CASE = "shift rows of several branches"
KERNELS = {
    "AddRmsNormDynamicQuant": 2,
    "QuantBatchMatmulV3": 4,
    "SplitV": 1,
    "ApplyRotaryPosEmb": 1,
    "ScatterPaKvCache": 1,
    "FusedInferAttentionScore": 1,
    "DynamicQuant": 1,
    "DequantSwigluQuant": 1,
    "Cmo": 1,  # the prefetch
}
# Neither costs a kernel: other shapes of the same bytes, and the caches as references.
FREE = {"Reshape", "Unsqueeze", "Identity", "RefData", "NetOutput"}


class LayerModule(torch.nn.Module):
    """A layer whose weights are buffers and whose step is tensors."""

    def __init__(self, ops: Ops, weights: Weights, layout: Layout) -> None:
        super().__init__()
        self.ops, self.layout = ops, layout
        for name in TINY.linears:
            self.register_buffer(f"{name}_values", weights.values[name])
            self.register_buffer(f"{name}_scales", weights.scales[name])
        self.register_buffer("qkv_bias", weights.qkv_bias)
        self.register_buffer("gamma_0", weights.gammas[0])
        self.register_buffer("gamma_1", weights.gammas[1])

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        slot: Tensor,
        table: Tensor,
        query_ends: list[int],
        kv_lengths: list[int],
    ) -> tuple[Tensor, Tensor]:
        weights = Weights(
            {name: getattr(self, f"{name}_values") for name in TINY.linears},
            {name: getattr(self, f"{name}_scales") for name in TINY.linears},
            self.qkv_bias,
            (self.gamma_0, self.gamma_1),
        )
        layout = replace(self.layout, slot_T=slot, rows=VirtualRows(table, query_ends, kv_lengths))
        return run_layer(self.ops, TINY, weights, Inputs(x, residual, cos, sin, keys, values), layout)


def arguments(inputs: Inputs, layout: Layout) -> tuple[Any, ...]:
    rows = layout.rows
    return (*inputs.__dict__.values(), layout.slot_T, rows.block_table, rows.query_ends, rows.kv_lengths)


@pytest.mark.parametrize("version", [1, 2])
def test_the_ge_graph_of_a_layer(torch_npu: Any, version: AttentionVersion) -> None:
    from sim import export

    layout = lay_out(CASES[CASE])
    module = LayerModule(npu_ops(AttentionForm(version)), draw_weights(TINY), layout)
    nodes = export.ge_graph(module, *arguments(draw_inputs(TINY, layout), layout))
    kernels = {op: count for op, count in export.histogram(nodes).items() if op not in FREE}
    # The lowering copies query and key, because the rotary kernel works in place. Nothing copies a cache.
    assert kernels == {**KERNELS, "TensorMove": 2}
    assert export.sources(nodes, "TensorMove") == ["Identity", "Identity"]
    assert export.sources(nodes, "ScatterPaKvCache").count("RefData") == 2


@pytest.mark.parametrize("options", [{"force_eager": True}, {}, {"clone_input": False}], ids=str)
def test_npugraph_ex_compiles_a_layer_without_a_graph_break(npu: Any, options: dict[str, bool]) -> None:
    """Twice: the first call compiles and captures, the second replays with other inputs."""
    keep_kv_writes_in_place()
    weights, layout = draw_weights(TINY), lay_out(CASES[CASE], "npu")
    compiled = compile_layer(LayerModule(npu_ops(), weights.to("npu"), layout), options)
    on_npu = draw_inputs(TINY, layout).to("npu")
    for seed in (11, 23):
        inputs = draw_inputs(TINY, layout, seed)
        for name, tensor in inputs.__dict__.items():
            getattr(on_npu, name).copy_(tensor)
        npu.stream.clear()
        got = compiled(*arguments(on_npu, layout))
        wanted = run_layer(reference_ops(), TINY, weights, inputs, lay_out(CASES[CASE]))
        for have, want in zip(got, wanted, strict=True):
            assert torch.equal(have.cpu(), want)
        assert torch.equal(on_npu.key_cache.cpu(), inputs.key_cache)
    assert cache_copies(npu, on_npu) == []


def test_npugraph_ex_follows_the_lengths(npu: Any) -> None:
    """The second set of lengths compiles the layer once more, with symbols; from then on they are task updates."""
    from torch._dynamo.utils import counters

    keep_kv_writes_in_place()
    layouts = [lay_out(grown(cached), "npu") for cached in (257, 258, 259, 260)]
    weights, on_npu = draw_weights(TINY), draw_inputs(TINY, layouts[0]).to("npu")
    module = LayerModule(npu_ops(), weights.to("npu"), layouts[0])
    compiled = compile_layer(module, {}, dynamic=None)
    counters.clear()
    for seed, layout in enumerate(layouts):
        inputs = draw_inputs(TINY, layout, seed)
        for name, tensor in inputs.__dict__.items():
            getattr(on_npu, name).copy_(tensor)
        got = compiled(*arguments(on_npu, layout))
        wanted = run_layer(reference_ops(), TINY, weights, inputs, lay_out(layout.branches))
        assert all(torch.equal(have.cpu(), want) for have, want in zip(got, wanted, strict=True))
    assert counters["stats"]["unique_graphs"] == 2
    assert not any("recapture" in event for event in counters["npugraph_ex"])


def grown(cached: int) -> list[Branch]:
    return [Branch(cached, [32, 32], shift=True), Branch(cached, [32], shift=True, salt=1)]


def test_npugraph_ex_would_copy_the_caches_by_itself(npu: Any) -> None:
    """The reason for keep_kv_writes_in_place; when this fails, torch-npu has learned it and the call can go."""
    from npugraph_ex._acl_concrete_graph import graph_pass

    graph_pass.inplaceable_npu_ops.pop(torch.ops.npu.npu_scatter_pa_kv_cache_functional.default, None)
    layout = lay_out(CASES[CASE], "npu")
    on_npu = draw_inputs(TINY, layout).to("npu")
    module = LayerModule(npu_ops(), draw_weights(TINY).to("npu"), layout)
    npu.stream.clear()
    compile_layer(module, {"force_eager": True})(*arguments(on_npu, layout))
    assert cache_copies(npu, on_npu) == ["npu::npu_scatter_pa_kv_cache_functional", "aten::copy_", "aten::copy_"]


def compile_layer(module: LayerModule, options: dict[str, bool], dynamic: bool | None = False) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="npugraph_ex", fullgraph=True, dynamic=dynamic, options=options)


def cache_copies(npu: Any, inputs: Inputs) -> list[str]:
    """Operators that copy something of a cache's shape."""
    shape = str(list(inputs.key_cache.shape))
    copying = ("clone", "copy", "functional")
    calls = (call for call in npu.stream if any(word in call.op for word in copying) and call.op != "aten::_to_copy")
    return [call.op for call in calls if any(shape in argument for argument in call.arguments)]
