"""The kernels of experts, routing, heads and small stages compile for Hopper: Triton's compiler needs no GPU, and takes
less than its interpreter does."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's process does not compile", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import lopa_cuda.kernels  # noqa: F401  # whose modules have the names of functions

pytestmark = pytest.mark.slow
HOPPER = GPUTarget("cuda", 90, 32)
INTEGERS = ("count_ptr", "expert_ptr", "first_ptr", "order_ptr", "position_ptr")
FLOATS = ("bias_ptr", "logits_ptr", "pair_weight_ptr", "rotary_ptr")
EXPERT = {"DEPTH": 2048, "CHOSEN": 8, "BLOCK_C": 64, "BLOCK_K": 64, "STAGES": 4}
ROUTE = {"CHOSEN": 8, "CHOSEN_BLOCK": 8, "IS_NORMALISED": True}
ROPE = {
    "PARTS": 0, "IS_BIAS_INT": False, "HEAD_SIZE": 128, "HEADS": 16, "weight_scale_ptr": None, "x_scale_ptr": None,
    "bias_ptr": None,
}  # fmt: skip
NORM = {
    "IS_BIAS_INT": False, "RANK": 0, "RANKS": 0, "QUANTIZED_MAX": 0.0, "IS_INT": False, "addends_ptr": None,
    "flags_ptr": None, "out_scale_ptr": None, "weight_scale_ptr": None, "x_scale_ptr": None,
}  # fmt: skip
GROUPED = {"TOP_GROUPS": 4, "IS_GROUPED": True, "IS_SIGMOID": True, "GROUPS": 8, "LENGTH": 32}
UNGROUPED = {"TOP_GROUPS": 1, "IS_GROUPED": False, "IS_SIGMOID": False, "GROUPS": 1, "LENGTH": 128, "bias_ptr": None}
GATED = {"IS_GATED": True, "pair_weight_ptr": None}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gate and up, few tokens": ("experts", "_expert_kernel", {**EXPERT, **GATED, "IS_SWAPPED": True, "BLOCK_T": 16}),
    "gate and up, many": ("experts", "_expert_kernel", {**EXPERT, **GATED, "IS_SWAPPED": False, "BLOCK_T": 128}),
    "down": ("experts", "_expert_kernel", {**EXPERT, "IS_GATED": False, "IS_SWAPPED": True, "BLOCK_T": 32}),
    "sum": ("experts", "_sum_choices_kernel", {"CHOSEN": 8, "BLOCK": 1024}),
    "route in groups": ("route", "_route_kernel", {**ROUTE, **GROUPED}),
    "route among all": ("route", "_route_kernel", {**ROUTE, **UNGROUPED}),
    "deal": ("route", "_deal_kernel", {"BLOCK": 1024}),
    "half of a head": ("rope_prewrite", "_rope_prewrite_kernel", {**ROPE, "PAIRS": 32, "BLOCK": 32, "REST_BLOCK": 64}),
    "norm of one token": ("norm", "_add_rms_norm_kernel", {**NORM, "TOKENS": 1, "BLOCK": 4096, "PARTS": 0}),
    "norm of several": ("norm", "_add_rms_norm_kernel", {**NORM, "TOKENS": 4, "BLOCK": 256, "PARTS": 4}),
    "swiglu of several": ("swiglu", "_swiglu_kernel", {"TOKENS": 2, "BLOCK": 1024}),
    "whole heads": ("rope_prewrite", "_rope_prewrite_kernel", {**ROPE, "PAIRS": 64, "BLOCK": 64, "REST_BLOCK": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_compiles_for_hopper(case: str) -> None:
    module, name, constants = CASES[case]
    kernel = getattr(sys.modules[f"lopa_cuda.kernels.{module}"], name)
    constants = {**constants, "PDL": True}
    signature = {argument: type_of(argument, constants) for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": True})
    assert compiled.asm["cubin"]


def type_of(argument: str, constants: dict[str, Any]) -> str:
    if argument in constants:
        return "constexpr"
    if argument.endswith("_ptr"):
        is_float = argument in FLOATS or (argument == "weight_ptr" and "IS_SIGMOID" in constants)
        return "*i32" if argument in INTEGERS else "*fp32" if is_float else "*bf16"
    return "fp32" if argument in ("scaling", "eps") else "i32"
