"""Twin of the rotary embedding, which the device computes in place."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_ascend.ops.rules import refuse, require


def npu_apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
    hardware_types: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate [T, heads, D] by cos, sin [T, 1, D]. As documented, and against the schema, the inputs are overwritten."""
    op = "npu_apply_rotary_pos_emb"
    require(rotary_mode == "half", op, "rotary_mode is half on Atlas A2/A3", rotary_mode)
    require(layout in ("BSND", "TND"), op, "layout is BSND or TND on Atlas A2/A3", layout)
    refuse(op, layout=None if layout == "TND" else layout)
    for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        require(tensor.dim() == 3 and tensor.numel() > 0, op, f"{name} is 3-D in TND and not empty", tensor)
        require(tensor.shape[0] == query.shape[0], op, f"{name} has the query's tokens, no broadcasting", tensor)
        floating = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
        require(floating and tensor.dtype == query.dtype, op, "query, key, cos and sin share a float dtype", tensor)
    head_size = query.shape[-1]
    require(head_size in (64, 128) or not hardware_types, op, "head size is 64 or 128", head_size)
    require(key.shape[-1] == head_size, op, "key has the query's head size", key)
    for name, tensor in (("cos", cos), ("sin", sin)):
        full = tuple(tensor.shape[1:]) == (1, head_size)
        require(full, op, f"{name} is [T, 1, {head_size}]: both halves, one head", tensor)
    query.copy_(_rotate(query, cos, sin))
    key.copy_(_rotate(key, cos, sin))
    return query, key


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (left, right), out = x.float().chunk(2, -1), torch.empty_like(x)
    (cos_left, cos_right), (sin_left, sin_right) = (part.float().chunk(2, -1) for part in (cos, sin))
    out_left, out_right = out.chunk(2, -1)
    out_left.copy_(left * cos_left - right * sin_left)
    out_right.copy_(right * cos_right + left * sin_right)
    return out
