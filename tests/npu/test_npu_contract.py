"""Every call of a Dream-7B step at TP4 is accepted by torch_npu's schemas and meta kernels and by the documented rules.

A call passes three gates here: the dispatcher binds it to the wheel's schema, the twin checks the documented rules, and
torch_npu's meta kernel gives the twin's shapes and dtypes. Products are not computed (their factors are checked).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from branches import Branch, lay_out
from layer import DREAM_7B_TP4, draw_inputs, draw_weights, run_layer
from sim import contract
from torch import Tensor

from lopa_ascend.ops import USUAL_ATTENTION, AttentionForm, npu_ops
from lopa_ascend.ops.twins import quant

pytestmark = pytest.mark.sim

WINDOWS = {"32": [32], "64": [32, 32], "128": [32] * 4, "256": [32] * 8}
NUM_ROWS = (1, 4, 8)  # every padded shape: test_npu_engine.py
# Operators of the step, and how often a layer calls each.
PER_LAYER = {
    "npu::npu_add_rms_norm_dynamic_quant": 2,
    "npu::npu_apply_rotary_pos_emb": 1,
    "npu::npu_dequant_swiglu_quant": 1,
    "npu::npu_dynamic_quant": 1,
    "npu::npu_prefetch": 1,
    "npu::npu_quant_matmul": 4,
    "npu::npu_scatter_pa_kv_cache": 1,
}
OTHERS = ("npu::npu_quantize", "npu::npu_swiglu", "npu::npu_grouped_matmul_swiglu_quant_v2")
ATTENTION = {1: "npu::npu_fused_infer_attention_score", 2: "npu::npu_fused_infer_attention_score_v2"}
FORMS = [AttentionForm(version, dims) for version in (1, 2) for dims in (3, 4)]


@pytest.fixture(scope="module")
def weights(torch_npu: Any) -> Any:
    from sim.device import SimulatedNpu

    with SimulatedNpu():
        return draw_weights(DREAM_7B_TP4).to("npu").in_nz(npu_ops())


@pytest.fixture(autouse=True)
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(x1: Tensor, x2: Tensor) -> Tensor:
        return torch.zeros(x1.shape[0], x2.shape[1], dtype=torch.int32)

    monkeypatch.setattr(quant, "int8_matmul", zeros)


def rows_of(num_rows: int, window: str, shift: bool) -> list[Branch]:
    return [Branch(300, WINDOWS[window], shift, salt) for salt in range(num_rows)]


def step(npu: Any, weights: Any, branches: list[Branch], form: AttentionForm = USUAL_ATTENTION) -> None:
    layout = lay_out(branches, "npu")
    run_layer(npu_ops(form), DREAM_7B_TP4, weights, draw_inputs(DREAM_7B_TP4, layout).to("npu"), layout)
    wanted = {**PER_LAYER, ATTENTION[form.version]: 1}
    assert {name: count for name, count in npu.counts.items() if name.startswith("npu::")} == wanted
    assert {signature.op for signature in npu.signatures} == wanted.keys()


@pytest.mark.parametrize(("num_rows", "window"), list(itertools.product(NUM_ROWS, WINDOWS)))
def test_a_step_at_dream_7b_tp4(npu: Any, weights: Any, num_rows: int, window: str) -> None:
    step(npu, weights, rows_of(num_rows, window, shift=False))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_step_with_shift_rows(npu: Any, weights: Any, num_rows: int, form: AttentionForm) -> None:
    step(npu, weights, rows_of(num_rows, "64", shift=True), form)


def test_the_first_step_of_a_long_prompt(npu: Any, weights: Any) -> None:
    step(npu, weights, [Branch(0, [1000, 32])])


@pytest.mark.parametrize("op", [*PER_LAYER, *ATTENTION.values(), *OTHERS])
def test_torch_npu_has_a_meta_kernel_to_compare_with(torch_npu: Any, op: str) -> None:
    assert contract.has_meta_kernel(op)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(("num_rows", "window"), list(itertools.product(NUM_ROWS, WINDOWS)))
def test_the_operators_of_a_bf16_layer(npu: Any, num_rows: int, window: str, shift: bool) -> None:
    """Checks operators that 8 bits do not use; rotation, KV and attention are the same calls. A whole step:
    test_npu_engine.py."""
    ops = npu_ops()
    num_tokens = len(lay_out(rows_of(num_rows, window, shift)).position_T)
    x, gamma = torch.zeros(num_tokens, 3584).bfloat16().npu(), torch.ones(3584).bfloat16().npu()
    assert ops.rms_norm(x, gamma, 1e-6).shape == x.shape
    assert ops.add_rms_norm(x, x, gamma, 1e-6).hidden.shape == x.shape
    assert ops.swiglu(torch.zeros(num_tokens, 9472).bfloat16().npu()).shape == (num_tokens, 4736)
    wanted = {f"npu::{name}" for name in ("npu_rms_norm", "npu_add_rms_norm", "npu_swiglu")}
    assert {signature.op for signature in npu.signatures} == wanted
    assert all(contract.has_meta_kernel(op) for op in wanted)


def test_the_operators_of_the_other_paths(npu: Any) -> None:
    """bf16 layers, and static quantization."""
    ops = npu_ops()
    x, gamma = torch.zeros(64, 3584).bfloat16().npu(), torch.ones(3584).bfloat16().npu()
    assert ops.rms_norm(x, gamma, 1e-6).shape == x.shape
    assert ops.add_rms_norm(x, x, gamma, 1e-6).residual.shape == x.shape
    assert ops.swiglu(torch.zeros(64, 9472).bfloat16().npu()).shape == (64, 4736)
    assert ops.dynamic_quant(x, gamma).scale_T.shape == (64,)
    one = torch.ones(1).npu()
    assert ops.static_quant(x, one, 0 * one).dtype == torch.int8
    gate_up = ops.to_nz(torch.zeros(1, 3584, 9472, dtype=torch.int8).npu())
    scale_N, scale_T = torch.ones(9472).npu(), torch.ones(64).npu()
    values, scale = ops.quant_matmul_swiglu_quant(x.to(torch.int8), gate_up, scale_N, scale_T)
    assert (values.shape, values.dtype, scale.shape) == ((64, 4736), torch.int8, (64,))
    names = {"npu_add_rms_norm", "npu_dynamic_quant", "npu_quantize", "npu_rms_norm", "npu_swiglu"}
    names |= {"npu_format_cast", "npu_grouped_matmul_swiglu_quant_v2"}
    assert {signature.op for signature in npu.signatures} == {f"npu::{name}" for name in names}
