"""Twins of what is done to weights: the cast to the cube unit's own layout, and the prefetch into L2."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_ascend.ops.rules import refuse, require

FRACTAL_NZ = 29


def npu_format_cast(input: Tensor, acl_format: int) -> Tensor:
    """A copy: the values stay, only the device's memory layout changes, so the result may not be sliced or written."""
    op = "npu_format_cast"
    refuse(op, acl_format=acl_format if acl_format != FRACTAL_NZ else None)
    require(input.dim() in (2, 3), op, "a weight is [K, N], or [E, K, N] of experts", input)
    require(input.dtype in (torch.int8, torch.bfloat16, torch.float16), op, "FRACTAL_NZ is for int8 and halves", input)
    require(input.is_contiguous(), op, "the weight is made contiguous before it is cast", input)
    return input.clone()


def npu_prefetch(input: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """Nothing on a CPU. `dependency` may not be None inside a graph."""
    op = "npu_prefetch"
    require(max_size > 0, op, "max_size is positive", max_size)
    require(0 <= offset < input.numel() * input.element_size(), op, "offset lies inside the tensor", offset)
