"""Splits qkv, rotates query and key and writes KV, in one launch between qkv's product and attention.

Reads each value of qkv once. Without it query, key and value are copied out, two of them rotated and two of them
written: five kernels. One program takes one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_and_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, query_ptr, keys_ptr, values_ptr, num_heads, num_kv_heads,
    HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_SIZE // 2
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, half)[None, :]
    num_all = num_heads + 2 * num_kv_heads
    is_head, is_value = head < num_all, head >= num_heads + num_kv_heads
    at = qkv_ptr + token * num_all * HEAD_SIZE + head * HEAD_SIZE + channel
    left = tl.load(at, mask=is_head, other=0.0).to(tl.float32)
    right = tl.load(at + half, mask=is_head, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HEAD_SIZE + channel).to(tl.float32)
    sin = tl.load(sin_ptr + token * HEAD_SIZE + channel).to(tl.float32)
    out_left = tl.where(is_value, left, left * cos - right * sin).to(tl.bfloat16)
    out_right = tl.where(is_value, right, right * cos + left * sin).to(tl.bfloat16)
    is_query = head < num_heads
    query_at = query_ptr + token * num_heads * HEAD_SIZE + head * HEAD_SIZE + channel
    tl.store(query_at, out_left, mask=is_query)
    tl.store(query_at + half, out_right, mask=is_query)
    row = tl.load(slot_ptr + token).to(tl.int64) * num_kv_heads * HEAD_SIZE
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
    key_at = keys_ptr + row + (head - num_heads) * HEAD_SIZE + channel
    tl.store(key_at, out_left, mask=is_key)
    tl.store(key_at + half, out_right, mask=is_key)
    value_at = values_ptr + row + (head - num_heads - num_kv_heads) * HEAD_SIZE + channel
    tl.store(value_at, out_left, mask=is_value & is_head)
    tl.store(value_at + half, out_right, mask=is_value & is_head)


def rotate_and_write(
    qkv_TE: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, key_cache: Tensor, value_cache: Tensor, slot_T: Tensor,
    num_heads: int,
) -> Tensor:  # fmt: skip
    """The rotated query [T, N, H]; rotated keys and values go to their slots of caches [P, page, K, H].

    All bfloat16 and contiguous, but int32 slots. cos and sin span both halves. Rounded once, after the rotation.
    """
    num_kv_heads, head_size = key_cache.shape[-2:]
    given = (qkv_TE, cos_T1H, sin_T1H, key_cache, value_cache, slot_T)
    assert all(tensor.is_contiguous() for tensor in given), "the kernel counts on adjacent rows"
    query_TNH = torch.empty((qkv_TE.shape[0], num_heads, head_size), dtype=qkv_TE.dtype, device=qkv_TE.device)
    _rotate_and_write_kernel[(qkv_TE.shape[0],)](
        qkv_TE, cos_T1H, sin_T1H, slot_T, query_TNH, key_cache, value_cache, num_heads, num_kv_heads,
        HEAD_SIZE=head_size, HEADS=triton.next_power_of_2(num_heads + 2 * num_kv_heads),
    )  # fmt: skip
    return query_TNH
