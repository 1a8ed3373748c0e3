"""Twins of the RMS norms, alone, with the residual add, and with the residual add and the int8 quantization fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopa_ascend.ops.rules import refuse, require
from lopa_ascend.ops.twins.quant import quantize_rows

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(normed, 1 / rms in float32)."""
    _check_norm("npu_rms_norm", input, gamma, _FLOATS)
    normed, inverse_rms = _rms_norm(input.float(), gamma, epsilon)
    return normed.to(input.dtype), inverse_rms


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, 1 / rms, x1 + x2). The norm sees the rounded sum, as the operator's one-token tiling does."""
    _check_add_norm("npu_add_rms_norm", x1, x2, gamma, _FLOATS)
    total = (x1.float() + x2.float()).to(x1.dtype)
    normed, inverse_rms = _rms_norm(total.float(), gamma, epsilon)
    return normed.to(x1.dtype), inverse_rms, total


def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: Sequence[bool] | None = None,
    hardware_types: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(int8, empty, x1 + x2, scale per token, empty): the second quantized output is never asked for here."""
    op = "npu_add_rms_norm_dynamic_quant"
    _check_add_norm(op, x1, x2, gamma, _HALF if hardware_types else _FLOATS)
    require(2 <= x1.dim() <= 8 and gamma.dim() == 1, op, "x1 has 2 to 8 dimensions and gamma one", (x1, gamma))
    if smooth_scale1 is not None:
        same = smooth_scale1.shape == gamma.shape and smooth_scale1.dtype == gamma.dtype
        require(same, op, "smooth_scale1 has gamma's shape and dtype", smooth_scale1)
    _check_output_mask(op, output_mask, smooth_scale1, smooth_scale2)
    refuse(op, smooth_scale2=smooth_scale2, beta=beta)
    total = x1.float() + x2.float()
    normed, _ = _rms_norm(total, gamma, epsilon)
    values, scale = quantize_rows(normed if smooth_scale1 is None else normed * smooth_scale1.float())
    return values, values.new_empty(0), total.to(x1.dtype), scale, scale.new_empty(0)


def _check_output_mask(
    op: str, output_mask: Sequence[bool] | None, smooth_scale1: Tensor | None, smooth_scale2: Tensor | None
) -> None:
    if not output_mask:
        paired = smooth_scale2 is None or smooth_scale1 is not None
        require(paired, op, "smooth_scale2 needs smooth_scale1", smooth_scale2)
        return
    first, second = (bool(on) for on in output_mask)
    require(first or second, op, "output_mask enables at least one output", list(output_mask))
    require(smooth_scale1 is None or first, op, "smooth_scale1 needs output_mask[0]", list(output_mask))
    require(smooth_scale2 is None or second, op, "smooth_scale2 needs output_mask[1]", list(output_mask))
    refuse(op, output_mask=list(output_mask) if second or not first else None)


def _check_norm(op: str, x: Tensor, gamma: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    require(x.dtype in dtypes, op, f"input dtype is one of {_names(dtypes)}", x)
    require(gamma.dtype == x.dtype, op, "gamma has the input's dtype", (x, gamma))
    require(1 <= x.dim() <= 8 and x.numel() > 0, op, "input has 1 to 8 dimensions and is not empty", x)
    trailing = x.shape[x.dim() - gamma.dim() :] if 1 <= gamma.dim() <= x.dim() else None
    require(trailing == gamma.shape, op, "gamma's shape equals the input's last dimensions", (x, gamma))


def _check_add_norm(op: str, x1: Tensor, x2: Tensor, gamma: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    require(x1.shape == x2.shape, op, "x1 and x2 have the same shape, without broadcasting", (x1, x2))
    require(x1.dtype == x2.dtype, op, "x1 and x2 have the same dtype", (x1, x2))
    _check_norm(op, x1, gamma, dtypes)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    inverse_rms = torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)
    return x * inverse_rms * gamma.float(), inverse_rms


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
