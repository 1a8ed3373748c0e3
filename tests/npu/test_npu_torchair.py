"""graph.mode torchair: torchair's own code lowers both halves of a step to GE graphs, and the simulated device runs
those graphs node by node (sim/ge.py)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_npu_engine import MODEL, cache_copies, causal, decode_all, engine_on

from common.checkpoint import load_model_config
from lopa_ascend.engine import AscendEngine
from lopa_ascend.ops import VirtualRows, npu_ops

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:When enable frozen_parameter")]
SHAPES = {"token_buckets": [80, 176], "row_buckets": [8, 16]}
# A layer's kernels by precision; the first norm has nothing to add, the last feeds the head, which is not quantized.
LAYER = {
    None: {"AddRmsNorm": 2, "MatMul": 3, "MatMulV2": 1, "SwiGlu": 1},
    "w8a8": {"AddRmsNormDynamicQuant": 2, "QuantBatchMatmulV3": 4, "DynamicQuant": 1, "DequantSwigluQuant": 1},
}
BOTH = {"SplitV": 1, "ApplyRotaryPosEmb": 1, "ScatterPaKvCache": 1, "FusedInferAttentionScore": 1, "TensorMove": 2}
ENDS = {None: {"RmsNorm": 1}, "w8a8": {"RmsNorm": 1, "AddRmsNorm": 1, "AddRmsNormDynamicQuant": -1, "DynamicQuant": 1}}


@pytest.fixture
def graphs(npu: Any) -> Any:
    """Every GE graph that this test compiles."""
    from sim import ge

    torch._dynamo.reset()
    ge.graphs.clear()
    return ge.graphs


def start(quantization: str | None, cache_dir: Path | None = None) -> AscendEngine:
    from sim import ge

    engine = engine_on("npu", causal(shift_row="fresh"), quantization, "torchair", cache_dir=cache_dir, shapes=SHAPES)
    selftest = ge.graphs.pop(0)
    assert selftest.kernels == {"FusedInferAttentionScore": 1} and selftest.num_runs == 2
    return engine


@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.slow), "w8a8"])
def test_ge_graphs_give_the_tokens_of_the_ref_lane(npu: Any, graphs: Any, quantization: str | None) -> None:
    """A whole generation; the lengths change at every step, and a shape is compiled once."""
    decode = causal(shift_row="fresh")
    engine = start(quantization)
    npu.stream.clear()
    found = decode_all(engine, decode)
    assert cache_copies(npu, engine) == []
    num_shapes = engine.layers.num_captured + engine.head.num_captured
    assert len(graphs) == num_shapes
    assert found == decode_all(engine_on("cpu", decode, quantization), decode)
    num_runs = [graph.num_runs for graph in graphs]
    assert max(num_runs) >= 10
    print(f"{quantization or 'bf16'}: {num_shapes} graphs, run {num_runs} times in {engine.num_steps} steps")


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_the_ge_graphs_of_a_step(graphs: Any, quantization: str | None) -> None:
    """One fused kernel an operation; nothing is copied but the rotary's inputs, and no weight is transposed."""
    start(quantization)
    layers, head = graphs[0], graphs[-1]
    num_layers = load_model_config(MODEL).num_layers
    wanted = Counter({"GatherV2": 3, **ENDS[quantization]})  # embedding, cos, sin
    for kind, count in {**LAYER[quantization], **BOTH}.items():
        wanted[kind] += count * num_layers
    assert layers.kernels == wanted
    by_name = {node.name: node for node in layers.nodes}

    def sources(kind: str) -> list[str]:
        inputs = [source for node in layers.nodes if node.kind == kind for _, source in node.inputs if source]
        return [by_name[source.split(":")[0]].kind for source in inputs]

    assert set(sources("TensorMove")) == {"Identity"}  # query and key
    # Both caches, which the graph is given, and the slots; key and value.
    assert Counter(sources("ScatterPaKvCache"))["Data"] == 3 * num_layers
    assert head.kernels["MatMul"] == 1 and head.kernels["Transpose"] == 0
    print(
        f"{quantization or 'bf16'}: {layers.kernels.total()} kernels in the layers, {head.kernels.total()} in the head"
    )


@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.slow), "w8a8"])
def test_weights_and_caches_are_frozen_inputs(graphs: Any, quantization: str | None) -> None:
    """A launch tells GE where the step's own inputs lie, of the layers six: tokens, positions, slots, the block table
    and the two lists of lengths; of the head the hidden states."""
    start(quantization)
    layers, head = graphs[0], graphs[-1]
    inputs = Counter(node.kind for node in layers.nodes)["Data"], Counter(node.kind for node in head.nodes)["Data"]
    assert (inputs[0] - layers.num_frozen, inputs[1] - head.num_frozen) == (6, 1)


@pytest.mark.usefixtures("npu")
def test_lengths_on_the_device_are_refused(graphs: Any) -> None:
    """The simulation's own rule: tiling needs them on the host."""
    engine = start(None)
    rows = engine._rows
    assert isinstance(rows.query_ends, torch.Tensor) and isinstance(rows.kv_lengths, torch.Tensor)
    query = torch.zeros(80, 4, 128).bfloat16().npu()
    keys, values = engine.cache.layers[0]
    on_device = VirtualRows(rows.block_table, rows.query_ends.npu(), rows.kv_lengths.npu())
    import torchair

    backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
    attend = torch.compile(npu_ops().paged_attention, backend=backend, fullgraph=True, dynamic=False)
    with pytest.raises(RuntimeError, match="lengths lie on the device"):
        attend(query, keys, values, on_device, 0.1)


@pytest.mark.slow
def test_a_second_start_lowers_nothing(npu: Any, graphs: Any, tmp_path: Path) -> None:
    """npu.cache_dir: what the first start lowered is found, and only GE's own part is done again."""
    from torch._dynamo.utils import counters

    decode = causal(shift_row="fresh")
    wanted = decode_all(engine_on("cpu", decode, "w8a8"), decode)
    num_lowered, num_compiled = [], []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        graphs.clear()
        npu.stream.clear()
        engine = start("w8a8", tmp_path)
        assert decode_all(engine, decode) == wanted
        assert cache_copies(npu, engine) == []
        num_lowered.append(counters["stats"]["unique_graphs"])
        num_compiled.append(len(graphs))
    num_shapes = engine.layers.num_captured + engine.head.num_captured
    assert (num_lowered, num_compiled) == ([num_shapes + 1, 1], [num_shapes] * 2)  # the self-test's is not kept
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*/forward_*"))) == num_shapes
