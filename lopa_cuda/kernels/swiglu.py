"""SwiGLU after a gate/up linear that did not fuse it.

The linear's [T, 2 I] in, [T, I] out: bf16, or int8 / fp8 with a scale per token for the down linear.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_cuda.kernels.launch import Quantize, overlap, release_successor, start_after_predecessor
from lopa_cuda.kernels.quantize import quantize_rows, silu_times
from quant.w8a8 import QuantizedActivation

VALUES_A_PROGRAM = 2048  # several tokens of a narrow model, part of one of a wide model


@triton.jit
def _swiglu_kernel(
    x_ptr, out_ptr, num_tokens, num_columns, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    release_successor(PDL)
    blocks_per_row = tl.cdiv(num_columns, BLOCK)
    token = (program // blocks_per_row * TOKENS + tl.arange(0, TOKENS))[:, None].to(tl.int64)
    column = (program % blocks_per_row * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (token < num_tokens) & (column < num_columns)
    start_after_predecessor(PDL)
    gate = tl.load(x_ptr + token * 2 * num_columns + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (token * 2 + 1) * num_columns + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_columns + column, silu_times(gate, up), mask=mask)


def swiglu(gate_up_TI: Tensor, *, quantize: Quantize | None = None) -> Tensor | QuantizedActivation:
    """silu(first half) * second half of [T, 2 I] -> [T, I], bf16 or quantized per token."""
    assert gate_up_TI.dtype == torch.bfloat16 and gate_up_TI.is_contiguous()
    num_tokens, num_columns = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    if quantize is not None:
        return quantize_rows(gate_up_TI, num_columns, quantize)
    out_TI = torch.empty((num_tokens, num_columns), dtype=torch.bfloat16, device=gate_up_TI.device)
    block = min(VALUES_A_PROGRAM, triton.next_power_of_2(num_columns))
    tokens = VALUES_A_PROGRAM // block
    num_programs = triton.cdiv(num_tokens, tokens) * triton.cdiv(num_columns, block)
    _swiglu_kernel[(num_programs,)](
        gate_up_TI, out_TI, num_tokens, num_columns, TOKENS=tokens, BLOCK=block, num_warps=8, **overlap()
    )  # fmt: skip
    return out_TI
