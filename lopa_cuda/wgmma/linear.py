"""Linears of 65 tokens and more by `linear.cu`: what a tile is compiled to, and its launch.

Shapes: T tokens, C output channels, K input channels.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from lopa_cuda.tiles import FETCHING_REGISTERS, Kind, WideConfig, WideLayout, wide_layout
from lopa_cuda.wgmma import compiler, driver

_ARCHITECTURE = "sm_90a"
_NAME = "wide_linear"
_SOURCE = Path(__file__).parent / "linear.cu"
KIND_OF: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
# wgmma's types and what follows its operands: no negation, and no transposition where there could be one.
_INSTRUCTIONS: dict[Kind, tuple[str, str]] = {
    "bf16": ("k16.f32.bf16.bf16", ", 1, 1, 0, 0"),
    "fp8": ("k32.f32.e4m3.e4m3", ", 1, 1"),
    "int8": ("k32.s32.s8.s8", ""),
}


@functools.cache
def why_unavailable() -> str | None:
    """Why this process's device cannot run these kernels; None if it can."""
    if torch.cuda.get_device_capability() != (9, 0):
        return "they are for compute capability 9.0"
    return None if compiler.is_available() else f"there is no NVRTC of CUDA {torch.version.cuda}"


def launch_wide_linear(
    x_TK: Tensor, x_scale_T: Tensor | None, weight_CK: Tensor, bias_C: Tensor | None, weight_scale_C: Tensor | None,
    config: WideConfig, out_TC: Tensor, *, is_gated: bool = False,
) -> None:  # fmt: skip
    """Compute the linear into `out`, bf16 [T, C], gated [T, C / 2]."""
    assert bias_C is None or not is_gated, "no model has a bias in front of SwiGLU"
    if bias_C is not None and bias_C.dtype != torch.int32:
        bias_C = bias_C.to(torch.bfloat16)  # as it is, but for what a folder holds in float32
    weight_scale_C = None if weight_scale_C is None else weight_scale_C.float()
    assert out_TC.dtype == torch.bfloat16 and out_TC.is_contiguous() and out_TC.data_ptr() % 16 == 0
    num_tokens = x_TK.shape[0]
    num_columns = weight_CK.shape[0] // (2 if is_gated else 1)
    kind = KIND_OF[weight_CK.dtype]
    layout = wide_layout(kind, config, num_tokens, x_TK.shape[1], is_gated)
    function = _function(kind, config, layout, is_gated)
    num_groups = -(-num_columns // (layout.columns * config.share)) * -(-num_tokens // layout.tokens)
    cluster = config.share * config.splits
    # Without splits programs stay for several tiles.
    num_clusters = num_groups if config.splits > 1 else min(num_groups, _num_multiprocessors() // cluster)
    depth_bytes = x_TK.shape[1] * x_TK.element_size()
    driver.launch(
        function, num_clusters * cluster, layout.threads,
        [
            driver.tensor_map(x_TK, layout.tokens // config.share, layout.block_bytes),
            driver.tensor_map(weight_CK, layout.columns, layout.block_bytes),
            *map(driver.pointer, (out_TC, weight_scale_C, x_scale_T, bias_C)),
            *map(ctypes.c_int, (
                bias_C is not None and bias_C.dtype == torch.int32, num_tokens, num_columns,
                -(-depth_bytes // layout.block_bytes),
            )),
        ],
    )  # fmt: skip


def source(kind: Kind, config: WideConfig, layout: WideLayout, is_gated: bool) -> str:
    """The text that is compiled for a tile."""
    constants = {
        "WARPGROUPS": layout.warpgroups, "TILES": layout.tiles, "ROWS": config.rows, "SPLITS": config.splits,
        "SHARE": config.share, "STAGES": layout.stages, "CHUNK": layout.chunk, "UNIT_BLOCKS": layout.unit_blocks,
        "IS_GIVING": int(layout.is_giving), "FETCHING_REGISTERS": FETCHING_REGISTERS,
        "BLOCK_BYTES": layout.block_bytes, "IS_CUT": int(config.tokens > 0),
        "IS_FLOAT8": int(kind == "fp8"), "IS_INT8": int(kind == "int8"), "IS_GATED": int(is_gated),
    }  # fmt: skip
    defines = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return defines + _multiply(kind, layout.chunk) + _SOURCE.read_text(encoding="utf-8")


def _multiply(kind: Kind, rows: int) -> str:
    """`multiply`: one instruction of 64 tokens by so many weight rows, whose operands are as many registers."""
    number, letter = ("int", "r") if kind == "int8" else ("float", "f")
    types, flags = _INSTRUCTIONS[kind]
    count = rows // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{letter}"(sum[{i}])' for i in range(count))
    return f"""
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef {number} Sum;
__device__ __forceinline__ void multiply(Sum (&sum)[{count}], uint64 x, uint64 w, int is_adding) {{
    asm volatile("{{\\n.reg .pred adding;\\nsetp.ne.b32 adding, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{rows}{types} {{{registers}}}, %{count}, %{count + 1}, adding{flags};\\n}}\\n"
        : {outputs} : "l"(x), "l"(w), "r"(is_adding));
}}
"""


@functools.cache
def _function(kind: Kind, config: WideConfig, layout: WideLayout, is_gated: bool) -> driver.Function:
    cubin = compiler.compiled(source(kind, config, layout, is_gated), _ARCHITECTURE)
    return driver.load(cubin, _NAME, layout.shared_bytes)


@functools.cache
def _num_multiprocessors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count
