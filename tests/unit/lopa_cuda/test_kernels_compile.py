"""The kernels of attention, experts, routing, heads and small stages compile for Hopper: Triton's compiler needs no
GPU, and takes less than its interpreter does."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's process does not compile", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import lopa_cuda.kernels  # noqa: F401  # whose modules have the names of functions
from lopa_cuda.kernels.attention import BLOCK_QUERIES, choose_splits
from lopa_cuda.kernels.experts import STAGES
from lopa_cuda.kernels.route import FEW, MANY, RouterTile
from lopa_cuda.machine import MACHINE

pytestmark = pytest.mark.slow
HOPPER = GPUTarget("cuda", 90, 32)
MULTIPLES_OF_16 = (
    "a_words", "b_words", "committed_kv", "committed_position", "inbox_stride", "log_sum_stride", "num_columns",
    "part_stride", "row_stride", "stride", "vocab_size", "window_kv", "window_offset", "window_token",
)  # fmt: skip
SHARED_BYTES = 227 * 2**10  # that a program may have
INTEGERS = (
    "a_out_ptr", "a_ptr", "b_out_ptr", "b_ptr", "bits_ptr", "chosen_ptr", "end_ptr", "expert_ptr", "first_ptr",
    "horizon_ptr", "index_ptr", "order_ptr", "position_ptr", "stacked_ptr", "table_ptr", "tile_ptr", "token_ptr",
    "turns_ptr",
)  # fmt: skip
ADDRESSES = ("flags_ptr", "inboxes_ptr", "windows_ptr")
FLOATS = ("bias_ptr", "log_sum_ptr", "pair_weight_ptr", "part_ptr", "rotary_ptr", "router_ptr", "scale_ptr",
    "weight_scale_ptr", "x_scale_ptr",
)  # fmt: skip
EXPERT_8 = {"DEPTH": 2048, "CHOSEN": 8, "BLOCK_K": 128, "STAGES": STAGES, "ACC": tl.int32, "ACCUMULATE": None}
EXPERT_FP8 = {**EXPERT_8, "DEPTH": 8192, "ACC": tl.float32, "ACCUMULATE": 128}
EXPERT = {**EXPERT_8, "ACC": tl.float32, "BLOCK_K": 64, "x_scale_ptr": None, "weight_scale_ptr": None}
ROUTE = {
    "PARTS": 8, "CHOSEN": 8, "CHOSEN_BLOCK": 8, "IS_NORMALISED": True, "CAPACITY": 48, "ROUTING_BLOCK": 32, "ROWS": 8,
}  # fmt: skip
ROPE = {
    "PARTS": 0, "IS_BIAS_INT": False, "HEAD_SIZE": 128, "HEADS": 16, "weight_scale_ptr": None, "x_scale_ptr": None,
    "bias_ptr": None,
}  # fmt: skip
WHOLE, ALONE = {**ROPE, "PAIRS": 64, "BLOCK": 64, "REST_BLOCK": 1}, {"RANKS": 0, "windows_ptr": None}
NORM = {
    "IS_BIAS_INT": False, "QUANTIZED_MAX": 0.0, "IS_INT": False, "out_scale_ptr": None, "weight_scale_ptr": None,
    "x_scale_ptr": None,
}  # fmt: skip
FOUR, ONE = {"RANK": 1, "RANKS": 4}, {"RANK": 0, "RANKS": 0, "inboxes_ptr": None}
ROWS = {"A_BLOCK": 2048, "B_BLOCK": 2048, "C_BLOCK": 1, "c_ptr": None, "c_out_ptr": None}
GROUPED = {"TOP_GROUPS": 4, "IS_GROUPED": True, "IS_SIGMOID": True, "GROUPS": 8, "LENGTH": 32}
UNGROUPED = {"TOP_GROUPS": 1, "IS_GROUPED": False, "IS_SIGMOID": False, "GROUPS": 1, "LENGTH": 128, "bias_ptr": None}
DRAWN = {"noise_ptr": None}
GATED, DOWN = {"IS_GATED": True, "pair_weight_ptr": None, "BLOCK_C": 64}, {"IS_GATED": False, "BLOCK_C": 128}


def router(tile: RouterTile) -> dict[str, Any]:
    return {
        "DEPTH": 2048, "PARTS": tile.parts, "BLOCK_T": tile.tokens, "BLOCK_E": tile.experts, "BLOCK_K": tile.channels,
        "STAGES": tile.stages, "THREADS": 128,
    }  # fmt: skip


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gate and up, few tokens": ("experts", "_expert_kernel", {**EXPERT, **GATED, "IS_SWAPPED": True, "BLOCK_T": 16}),
    "gate and up, many": ("experts", "_expert_kernel", {**EXPERT, **GATED, "IS_SWAPPED": False, "BLOCK_T": 64}),
    "down": ("experts", "_expert_kernel", {**EXPERT, **DOWN, "IS_SWAPPED": True, "BLOCK_T": 32}),
    "gate and up in 8 bits": ("experts", "_expert_kernel", {**EXPERT_8, **GATED, "IS_SWAPPED": True, "BLOCK_T": 16}),
    "down in 8 bits": ("experts", "_expert_kernel", {**EXPERT_8, **DOWN, "IS_SWAPPED": False, "BLOCK_T": 64}),
    "gate and up in fp8": ("experts", "_expert_kernel", {**EXPERT_FP8, **GATED, "IS_SWAPPED": False, "BLOCK_T": 64}),
    "down in fp8": ("experts", "_expert_kernel", {**EXPERT_FP8, **DOWN, "IS_SWAPPED": True, "BLOCK_T": 16}),
    "tiles of a class": (
        "class_statistics", "_tile_kernel",
        {
            **DRAWN, "IS_SAMPLED": False, "TEMPERS": False, "SCALE": 1.0, "POSITIONS": 4, "SIZE": 512, "VALUES": 6,
            "temperature_ptr": None, "key_ptr": None, "factor_ptr": None, "column_key_ptr": None,
            "column_factor_ptr": None,
        },
    ),
    "classes": (
        "class_statistics", "_class_kernel", {**DRAWN, "IS_SAMPLED": False, "ROWS": 4, "BLOCK": 32, "VALUES": 6}
    ),
    "sum": ("experts", "_sum_choices_kernel", {"CHOSEN": 8, "BLOCK": 1024}),
    "router, few tokens": ("route", "_router_kernel", router(FEW)),
    "router, many": ("route", "_router_kernel", router(MANY)),
    "route in groups": ("route", "_route_kernel", {**ROUTE, **GROUPED}),
    "route among all": ("route", "_route_kernel", {**ROUTE, **UNGROUPED}),
    "deal": ("route", "_deal_kernel", {"TILE": 16, "BLOCK": 1024}),
    "half of a head": (
        "rope_prewrite", "_rope_prewrite_kernel", {**ROPE, **ALONE, "PAIRS": 32, "BLOCK": 32, "REST_BLOCK": 64}
    ),
    "norm of one token": ("norm", "_add_rms_norm_kernel", {**NORM, **ONE, "TOKENS": 1, "BLOCK": 4096, "PARTS": 0}),
    "norm of four ranks": ("norm", "_add_rms_norm_kernel", {**NORM, **FOUR, "TOKENS": 1, "BLOCK": 4096, "PARTS": 2}),
    "stack of four ranks": ("meet", "_stack_kernel", {**FOUR, "BLOCK": 1024}),
    "norm of several": ("norm", "_add_rms_norm_kernel", {**NORM, **ONE, "TOKENS": 4, "BLOCK": 256, "PARTS": 4}),
    "rows": ("rows", "_copy_rows_kernel", ROWS),
    "swiglu of several": ("swiglu", "_swiglu_kernel", {"TOKENS": 2, "BLOCK": 1024}),
    "meeting": ("meet", "_meet_kernel", FOUR),
    "whole heads": ("rope_prewrite", "_rope_prewrite_kernel", {**WHOLE, **ALONE}),
    "whole heads of every rank": ("rope_prewrite", "_rope_prewrite_kernel", {**WHOLE, "RANKS": 2}),
}  # fmt: skip
WIDE_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "head statistics": ("head_statistics", "_vocabulary_part_kernel", {"STRATEGY": 0, "BLOCK": 8192}),
    "quantized swiglu": (
        "quantize", "_quantize_rows_kernel",
        {"QUANTIZED_MAX": 127.0, "IS_INT": True, "IS_GATED": True, "BLOCK": 16384, "TAIL": 4096},
    ),
}  # fmt: skip


MOVING = (
    "norm of one token", "norm of four ranks", "rows", "swiglu of several", "whole heads", "whole heads of every rank",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_compiles_for_hopper(case: str) -> None:
    assert compiled(*CASES[case]).asm["cubin"]


@pytest.mark.parametrize("case", [*MOVING, *WIDE_CASES])
def test_a_small_stage_moves_many_bytes_at_a_time(case: str) -> None:
    """A mask or an address that the compiler cannot see through makes it load and store two bytes at a time."""
    assembly = compiled(*{**CASES, **WIDE_CASES}[case]).asm["sass"]
    moves = re.findall(r"(?:LDG|STG)\.E\S*", assembly)
    assert any(move.endswith(".128") for move in moves)
    assert not [move for move in moves if re.search(r"\.[US](8|16)$", move)]


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_attention_keeps_its_sums_in_registers(is_long: bool, splits: int) -> None:
    """Next to nothing is spilled, and no product waits for the one before it, as the assembler has them do where
    registers are too few."""
    constants = {
        "RECORD": 8, "TABLE_ROW": 32, "GROUP": 7, "HEAD_SIZE": 128, "BLOCK_QUERIES": BLOCK_QUERIES, "BLOCK_KEYS": 64,
        "SPLITS": splits, "STAGES": MACHINE.attention.stages, "IS_LONG": is_long,
        **({} if is_long else {"window_desc": None}),
        **({"part_ptr": None, "log_sum_ptr": None} if splits == 1 else {}),
    }  # fmt: skip
    kernel = compiled("attention", "_attention_kernel", constants)
    assembly = kernel.asm["sass"]
    assert assembly.count("STL") <= 4, "numbers that are kept from before a loop until after it"
    assert 0 < assembly.count("WARPGROUP.DEPBAR") < assembly.count("HGMMA") / 2
    assert kernel.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("is_long", [False, True])
def test_heads_of_256_fit_shared_memory(is_long: bool) -> None:
    """Covers every number of programs: few of them take more stages of smaller heads."""
    most = max(choose_splits(2, num_queries, 256)[1] for num_queries in range(64, 64 * 64, 64))
    assert most < max(choose_splits(2, num_queries, 128)[1] for num_queries in range(64, 64 * 64, 64))
    constants = {
        "RECORD": 8, "TABLE_ROW": 32, "GROUP": 4, "HEAD_SIZE": 256, "BLOCK_QUERIES": BLOCK_QUERIES, "BLOCK_KEYS": 64,
        "SPLITS": 4, "STAGES": most, "IS_LONG": is_long, **({} if is_long else {"window_desc": None}),
    }  # fmt: skip
    assert compiled("attention", "_attention_kernel", constants).metadata.shared <= SHARED_BYTES


def compiled(module: str, name: str, constants: dict[str, Any]) -> Any:
    kernel = getattr(sys.modules[f"lopa_cuda.kernels.{module}"], name)
    constants = {**constants, "PDL": True}
    signature = {argument: type_of(argument, constants) for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in MULTIPLES_OF_16]
    attributes = {(kernel.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
    source = ASTSource(kernel, signature, places, attributes)
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": True})


def type_of(argument: str, constants: dict[str, Any]) -> str:
    if argument in constants:
        return "constexpr"
    if argument.endswith("_desc"):
        return f"tensordesc<bf16[{constants['BLOCK_KEYS']},{constants['HEAD_SIZE']}]>"
    if argument in ADDRESSES:
        return "*i64"
    if argument.endswith("_ptr"):
        is_float = argument in FLOATS or (argument in ("logits_ptr", "weight_ptr") and "IS_SIGMOID" in constants)
        is_quantized = argument == "out_ptr" and constants.get("QUANTIZED_MAX", 0) > 0
        if argument in ("x_ptr", "weight_ptr") and "ACC" in constants and "x_scale_ptr" not in constants:
            return "*i8" if constants["ACC"] == tl.int32 else "*fp8e4nv"
        return "*i32" if argument in INTEGERS else "*fp32" if is_float else "*i8" if is_quantized else "*bf16"
    return "fp32" if argument in ("scale", "scaling", "eps") else "i32"
