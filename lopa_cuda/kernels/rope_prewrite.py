"""QKV bias, norms of query and key heads, rotary embedding and Pre-Write in one launch, between the qkv linear and
attention.

Reads the merged qkv (bf16, or split-K parts whose sum is taken here), writes the rotated q out and the rotated k and
the v into this step's window cache, on every rank where ranks share a pass. One program computes a few heads, counted
through all tokens. A head is three stretches: the left and the right of its rotated pairs, and the rest, which is empty
unless rotation is partial.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.model import QKNorm
from lopa_cuda.kernels.launch import (
    KEEP,
    Mirrors,
    Partials,
    load_sum,
    overlap,
    partial_arguments,
    release_successor,
    start_after_predecessor,
)

HEADS, WARPS = 16, 4  # a program; with 4 heads starting the programs took longer than their work


@triton.jit
def _head_weight(q_weight_ptr, k_weight_ptr, channel, is_query, SIZE: tl.constexpr):
    """The norm's weight for each head's channels, of which the last of a block may lie past the head."""
    q_weight = tl.load(q_weight_ptr + channel, mask=channel < SIZE, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + channel, mask=channel < SIZE, other=0.0).to(tl.float32)
    return tl.where(is_query, q_weight, k_weight)


@triton.jit
def _normed(x, scale, weight, is_value):
    """Norm query and key heads, rounded to bf16 as the plain norm's output is; leave values as they are."""
    return tl.where(is_value, x, (x * scale * weight).to(tl.bfloat16).to(tl.float32))


@triton.jit
def _store_heads(
    x, q_at, window_ptr, windows_ptr, window_offset, kv_offset, is_query, is_key_value, RANKS: tl.constexpr
):  # fmt: skip
    x = x.to(tl.bfloat16)
    tl.store(q_at, x, mask=is_query, eviction_policy=KEEP)
    if RANKS == 0:
        tl.store(window_ptr + kv_offset, x, mask=is_key_value)
    for rank in tl.static_range(RANKS):
        window = tl.load(windows_ptr + rank).to(tl.pointer_type(tl.bfloat16))
        # The first offset may come near to what 32 bits hold: it is added to the pointer, not to the second one.
        tl.store(tl.multiple_of(window, 16) + window_offset + kv_offset, x, mask=is_key_value)


@triton.jit
def _rope_prewrite_kernel(
    values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, q_weight_ptr, k_weight_ptr, position_ptr, rotary_ptr, q_ptr,
    window_ptr, windows_ptr, part_stride, num_tokens, num_heads, num_kv_heads, window_kv, window_token, window_offset,
    eps, PARTS: tl.constexpr, IS_BIAS_INT: tl.constexpr, HEAD_SIZE: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEADS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_successor(PDL)
    num_all = num_heads + 2 * num_kv_heads
    counted = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[:, None]
    is_there = counted < num_tokens * num_all
    token, head = tl.minimum(counted // num_all, num_tokens - 1), counted % num_all
    is_query_head, is_value = head < num_heads, head >= num_heads + num_kv_heads
    pair, rest = tl.arange(0, BLOCK)[None, :], 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
    mask, rest_mask = is_there & (pair < PAIRS), is_there & (rest < HEAD_SIZE)
    position = tl.load(position_ptr + token).to(tl.int64)
    cos = tl.load(rotary_ptr + position * 2 * PAIRS + pair, mask=mask, other=0.0)
    sin = tl.load(rotary_ptr + position * 2 * PAIRS + PAIRS + pair, mask=mask, other=0.0)
    start_after_predecessor(PDL)
    left = load_sum(
        values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, head * HEAD_SIZE + pair, mask, part_stride,
        num_all * HEAD_SIZE, PARTS, IS_BIAS_INT,
    )  # fmt: skip
    right = load_sum(
        values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, head * HEAD_SIZE + PAIRS + pair, mask, part_stride,
        num_all * HEAD_SIZE, PARTS, IS_BIAS_INT,
    )  # fmt: skip
    if 2 * PAIRS < HEAD_SIZE:
        still = load_sum(
            values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, head * HEAD_SIZE + rest, rest_mask,
            part_stride, num_all * HEAD_SIZE, PARTS, IS_BIAS_INT,
        )  # fmt: skip
    if q_weight_ptr is not None:
        total = tl.sum(left * left + right * right, axis=1)[:, None]
        if 2 * PAIRS < HEAD_SIZE:
            total += tl.sum(still * still, axis=1)[:, None]
        scale = tl.rsqrt(total / HEAD_SIZE + eps)
        left = _normed(left, scale, _head_weight(q_weight_ptr, k_weight_ptr, pair, is_query_head, HEAD_SIZE), is_value)
        weight = _head_weight(q_weight_ptr, k_weight_ptr, PAIRS + pair, is_query_head, HEAD_SIZE)
        right = _normed(right, scale, weight, is_value)
        if 2 * PAIRS < HEAD_SIZE:
            weight = _head_weight(q_weight_ptr, k_weight_ptr, rest, is_query_head, HEAD_SIZE)
            still = _normed(still, scale, weight, is_value)
    q_at = q_ptr + token.to(tl.int64) * num_heads * HEAD_SIZE + head * HEAD_SIZE
    kv_head = head - num_heads - tl.where(is_value, num_kv_heads, 0)
    # A product, not a choice: from it the compiler sees that eight channels can be stored at once.
    kv_at = is_value.to(tl.int32) * window_kv + token * window_token + kv_head * HEAD_SIZE
    is_query, is_key_value = mask & is_query_head, mask & (head >= num_heads)
    _store_heads(
        tl.where(is_value, left, left * cos - right * sin), q_at + pair, window_ptr, windows_ptr,
        window_offset, kv_at + pair, is_query, is_key_value, RANKS,
    )  # fmt: skip
    _store_heads(
        tl.where(is_value, right, right * cos + left * sin), q_at + PAIRS + pair, window_ptr, windows_ptr,
        window_offset, kv_at + PAIRS + pair, is_query, is_key_value, RANKS,
    )  # fmt: skip
    if 2 * PAIRS < HEAD_SIZE:
        _store_heads(
            still, q_at + rest, window_ptr, windows_ptr, window_offset, kv_at + rest, rest_mask & is_query_head,
            rest_mask & (head >= num_heads), RANKS,
        )  # fmt: skip


def rope_prewrite(
    qkv: Tensor | Partials, position_T: Tensor, rotary_P2F: Tensor, window_2TKH: Tensor, *, num_heads: int,
    qk_norm: QKNorm | None = None, mirrors: Mirrors | None = None,
) -> Tensor:  # fmt: skip
    """Norm q and k by head if asked to, rotate them, write k and v into the window cache, return q [T, N, H].

    qkv: [T, (N + 2 K) H] with its bias added (or Partials that carry it). rotary: common.model.ops.rotary_table, whose
    2 F dimensions are the first of a head. window: one layer of the window cache, of T tokens at least. position: int32
    or int64.
    """
    pointers, constants = partial_arguments(qkv)
    num_tokens = pointers[0].shape[-2]
    num_kv_heads, head_size = window_2TKH.shape[-2:]
    num_pairs = rotary_P2F.shape[-1]
    assert window_2TKH.stride()[-2:] == (head_size, 1) and position_T.is_contiguous()
    weights = (None, None, 0.0) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps)
    q_TNH = torch.empty((num_tokens, num_heads, head_size), dtype=torch.bfloat16, device=rotary_P2F.device)
    num_programs = triton.cdiv(num_tokens * (num_heads + 2 * num_kv_heads), HEADS)
    addresses_P, offset = (None, 0) if mirrors is None else mirrors
    _rope_prewrite_kernel[(num_programs,)](
        *pointers, *weights[:2], position_T, rotary_P2F, q_TNH, window_2TKH, addresses_P,
        num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads,
        window_kv=window_2TKH.stride(0), window_token=window_2TKH.stride(1), window_offset=offset, eps=weights[2],
        **constants, HEAD_SIZE=head_size, PAIRS=num_pairs, BLOCK=triton.next_power_of_2(num_pairs),
        REST_BLOCK=triton.next_power_of_2(max(1, head_size - 2 * num_pairs)),
        HEADS=HEADS, RANKS=0 if addresses_P is None else len(addresses_P), num_warps=WARPS, **overlap(),
    )  # fmt: skip
    return q_TNH
