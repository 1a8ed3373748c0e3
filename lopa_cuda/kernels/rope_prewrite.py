"""QKV bias, rotary embedding and Pre-Write in one launch, between the qkv linear and attention.

Reads the merged qkv (bf16, or split-K parts whose sum is taken here), writes the rotated q out and the rotated k and
the v into this step's window cache. One program computes a few heads of one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_cuda.kernels.launch import (
    KEEP,
    Partials,
    load_sum,
    overlap,
    partial_arguments,
    release_successor,
    start_after_predecessor,
)

HEADS_PER_PROGRAM = 4


@triton.jit
def _rope_prewrite_kernel(
    values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, position_ptr, rotary_ptr, q_ptr, window_ptr,
    part_stride, num_heads, num_kv_heads, window_kv, window_token,
    PARTS: tl.constexpr, IS_BIAS_INT: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    release_successor(PDL)
    num_all = num_heads + 2 * num_kv_heads
    groups = tl.cdiv(num_all, HEADS)
    token = program // groups
    head = (program % groups * HEADS + tl.arange(0, HEADS))[:, None]
    half: tl.constexpr = HEAD_SIZE // 2
    channel = tl.arange(0, half)[None, :]
    mask = (head < num_all) & (channel < half)
    column = head * HEAD_SIZE + channel
    position = tl.load(position_ptr + token).to(tl.int64)
    cos = tl.load(rotary_ptr + position * HEAD_SIZE + channel)
    sin = tl.load(rotary_ptr + position * HEAD_SIZE + half + channel)
    start_after_predecessor(PDL)
    left = load_sum(
        values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, column, mask, part_stride, num_all * HEAD_SIZE,
        PARTS, IS_BIAS_INT,
    )  # fmt: skip
    right = load_sum(
        values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, column + half, mask, part_stride,
        num_all * HEAD_SIZE, PARTS, IS_BIAS_INT,
    )  # fmt: skip
    is_value = head >= num_heads + num_kv_heads
    rotated_left = tl.where(is_value, left, left * cos - right * sin).to(tl.bfloat16)
    rotated_right = tl.where(is_value, right, right * cos + left * sin).to(tl.bfloat16)
    is_query = mask & (head < num_heads)
    q_at = q_ptr + token.to(tl.int64) * num_heads * HEAD_SIZE + column
    tl.store(q_at, rotated_left, mask=is_query, eviction_policy=KEEP)
    tl.store(q_at + half, rotated_right, mask=is_query, eviction_policy=KEEP)
    kv_head = head - num_heads - tl.where(is_value, num_kv_heads, 0)
    kv_at = window_ptr + tl.where(is_value, window_kv, 0) + token * window_token + kv_head * HEAD_SIZE + channel
    is_key_value = mask & (head >= num_heads)
    tl.store(kv_at, rotated_left, mask=is_key_value)
    tl.store(kv_at + half, rotated_right, mask=is_key_value)


def rope_prewrite(
    qkv: Tensor | Partials, position_T: Tensor, rotary_P2F: Tensor, window_2TKH: Tensor, *, num_heads: int
) -> Tensor:
    """Rotate q and k, write k and v into the window cache, return q [T, N, H].

    qkv: [T, (N + 2 K) H] with its bias added (or Partials that carry it). rotary: common.model.ops.rotary_table.
    window: one layer of the window cache, of T tokens at least. position: int32 or int64.
    """
    pointers, constants = partial_arguments(qkv)
    num_tokens = pointers[0].shape[-2]
    num_kv_heads, head_size = window_2TKH.shape[-2:]
    assert window_2TKH.stride()[-2:] == (head_size, 1) and position_T.is_contiguous()
    q_TNH = torch.empty((num_tokens, num_heads, head_size), dtype=torch.bfloat16, device=rotary_P2F.device)
    num_programs = num_tokens * triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM)
    _rope_prewrite_kernel[(num_programs,)](
        *pointers, position_T, rotary_P2F, q_TNH, window_2TKH,
        num_heads=num_heads, num_kv_heads=num_kv_heads,
        window_kv=window_2TKH.stride(0), window_token=window_2TKH.stride(1),
        **constants, HEAD_SIZE=head_size, HEADS=HEADS_PER_PROGRAM, num_warps=2, **overlap(),
    )  # fmt: skip
    return q_TNH
