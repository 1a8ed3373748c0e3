"""A whole W8A8 layer through the facade: right in the ref lane, and the same bits from the npu lane."""

from __future__ import annotations

import pytest
import torch
from branches import CASES, Branch, lay_out
from layer import TINY, draw_inputs, draw_weights, run_layer, run_layer_in_float64

from lopa_ascend.ops import npu_ops, reference_ops


@pytest.mark.parametrize("case", CASES)
def test_the_layer_agrees_with_float64(case: str) -> None:
    layout, weights = lay_out(CASES[case]), draw_weights(TINY)
    inputs = draw_inputs(TINY, layout)
    wanted = run_layer_in_float64(TINY, weights, inputs, layout)
    got = run_layer(reference_ops(), TINY, weights, inputs, layout)
    # int8 activations are requantized after bfloat16 roundings: the error is that of a few quantization steps.
    for have, want, limit in zip(got, wanted, (0.03, 0.01), strict=True):
        assert float((have.double() - want).norm() / want.norm()) < limit


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("case", CASES)
def test_the_npu_lane_gives_the_bits_of_the_ref_lane(case: str) -> None:
    weights, inputs = draw_weights(TINY), draw_inputs(TINY, lay_out(CASES[case]))
    ops = npu_ops()
    on_npu = weights.to("npu").in_nz(ops), inputs.to("npu")
    got = run_layer(ops, TINY, *on_npu, lay_out(CASES[case], "npu"))
    wanted = run_layer(reference_ops(), TINY, weights, inputs, lay_out(CASES[case]))
    for have, want in zip(got, wanted, strict=True):
        assert torch.equal(have.cpu(), want)
    assert torch.equal(on_npu[1].key_cache.cpu(), inputs.key_cache)


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
def test_a_captured_layer_replays_with_new_inputs_and_lengths() -> None:
    before, after = (
        [Branch(cached, [32, 32], shift=True), Branch(cached, [32], shift=True, salt=1)] for cached in (257, 260)
    )
    ops, weights, layout = npu_ops(), draw_weights(TINY), lay_out(before, "npu")
    inputs = draw_inputs(TINY, layout).to("npu")
    on_npu = weights.to("npu").in_nz(ops)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        outputs = run_layer(ops, TINY, on_npu, inputs, layout)
    fresh_layout = lay_out(after)
    fresh = draw_inputs(TINY, fresh_layout, seed=23)
    layout.slot_T.copy_(fresh_layout.slot_T)
    for name, tensor in fresh.__dict__.items():
        getattr(inputs, name).copy_(tensor)
    graph.update(cpu_update_input=[ops.attention_lengths(fresh_layout.rows)])
    graph.replay()
    wanted = run_layer(reference_ops(), TINY, weights, fresh, fresh_layout)
    for have, want in zip(outputs, wanted, strict=True):
        assert torch.equal(have.cpu(), want)
