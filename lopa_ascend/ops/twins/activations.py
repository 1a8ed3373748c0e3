"""Twins of the gated activation, plain and fused with dequantization before and quantization after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from lopa_ascend.ops.rules import refuse, require
from lopa_ascend.ops.twins import quant
from lopa_ascend.ops.twins.quant import quantize_rows

_WIDEST_GROUPED = 10496
WIDEST_GATE_UP = 10240


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half."""
    op = "npu_swiglu"
    require(input.dtype in (torch.float16, torch.bfloat16, torch.float32), op, "input is a float", input)
    require(input.shape[dim] % 2 == 0, op, f"the size of dimension {dim} is even", input)
    left, right = input.float().chunk(2, dim)
    return silu(left).mul_(right).to(input.dtype)


def npu_dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    quant_scale: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    hardware_types: bool = True,
) -> tuple[Tensor, Tensor]:
    """int32 accumulator [T, 2H] -> (int8 [T, H], scale [T]). The default activates the RIGHT half. group_index: rows of
    each group, which has a line of weight_scale; rows past them would be garbage."""
    op = "npu_dequant_swiglu_quant"
    require(x.dim() == 2, op, "x is 2-D", x)
    require(x.shape[1] % 2 == 0, op, "the last dimension of x is even", x)
    require(quant_mode in (0, 1), op, "quant_mode is 0 (static) or 1 (dynamic)", quant_mode)
    refuse(op, static_quant_mode=quant_mode == 0, x=x if x.dtype != torch.int32 else None)
    num_tokens, width = x.shape
    require(weight_scale is not None and activation_scale is not None, op, "an int32 x needs both scales", x)
    assert weight_scale is not None and activation_scale is not None
    num_groups = 1 if group_index is None else len(group_index)
    fits = weight_scale.dtype == torch.float32 and tuple(weight_scale.shape) == (num_groups, width)
    require(fits, op, f"weight_scale is float32 with shape [{num_groups}, {width}]", weight_scale)
    if group_index is not None:
        _check_groups(op, group_index, num_tokens, width // 2, hardware_types)
        refuse(op, quant_scale=quant_scale)
        weight_scale = weight_scale.repeat_interleave(group_index, dim=0)
    fits = activation_scale.dtype == torch.float32 and tuple(activation_scale.shape) == (num_tokens,)
    require(fits, op, f"activation_scale is float32 with shape [{num_tokens}]", activation_scale)
    left, right = x.float().mul_(weight_scale).mul_(activation_scale[:, None]).chunk(2, 1)
    gated = silu(left).mul_(right) if activate_left else silu(right).mul_(left)
    if quant_scale is not None:
        half = (1, width // 2)
        require(tuple(quant_scale.shape) == half, op, f"quant_scale has shape {list(half)}", quant_scale)
        gated = gated * quant_scale.float()
    return quantize_rows(gated)


def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor, weight: Sequence[Tensor], weight_scale: Sequence[Tensor], x_scale: Tensor, group_list: Tensor
) -> tuple[Tensor, Tensor]:
    """x int8 [T, K] @ weight int8 [1, K, 2H] -> int8 [T, H] of silu(left) * right, scale [T]. There is one group:
    group_list holds T."""
    op = "npu_grouped_matmul_swiglu_quant_v2"
    require(len(weight) == len(weight_scale) == 1, op, "there is one weight and one scale", (weight, weight_scale))
    one_EKN, scale_EN = weight[0], weight_scale[0]
    require(x.dtype == one_EKN.dtype == torch.int8, op, "x and weight are int8", (x, one_EKN))
    fits = x.dim() == 2 and one_EKN.dim() == 3 and x.shape[1] == one_EKN.shape[1]
    require(fits, op, "x is [M, K] and weight [E, K, N]", (x, one_EKN))
    num_groups, _, width = one_EKN.shape
    refuse(op, several_groups=one_EKN if num_groups > 1 else None)
    require(width % 2 == 0 and width <= WIDEST_GATE_UP, op, f"N is even and at most {WIDEST_GATE_UP}", width)
    fits = scale_EN.dtype == torch.float32 and tuple(scale_EN.shape) == (num_groups, width)
    require(fits, op, f"weight_scale is float32 with shape [{num_groups}, {width}]", scale_EN)
    fits = x_scale.dtype == torch.float32 and tuple(x_scale.shape) == (len(x),)
    require(fits, op, f"x_scale is float32 with shape [{len(x)}]", x_scale)
    fits = group_list.dtype == torch.int64 and group_list.tolist() == [len(x)]
    require(fits, op, f"group_list is int64, the cumulative counts of {len(x)} rows", group_list)
    gate_up = quant.int8_matmul(x, one_EKN[0]).float().mul_(scale_EN).mul_(x_scale[:, None])
    left, right = gate_up.chunk(2, 1)
    return quantize_rows(silu(left).mul_(right))


def _check_groups(op: str, group_index: Tensor, num_tokens: int, half: int, hardware_types: bool) -> None:
    counts = group_index.dtype == torch.int64 and group_index.dim() == 1
    require(counts, op, "group_index is int64 counts", group_index)
    is_whole = int(group_index.min()) >= 0 and int(group_index.sum()) == num_tokens
    require(is_whole, op, f"counts are not negative and sum up to the {num_tokens} rows of x", group_index)
    fits = half <= _WIDEST_GROUPED and (half % 64 == 0 or not hardware_types)
    require(fits, op, f"in groups H is a multiple of 64 up to {_WIDEST_GROUPED}", half)
