"""Attention of each row's window over [its slot's committed keys, in pages | its own window], after rope_prewrite.

FlashAttention style: the N / K query heads of a KV head and a row's entries are folded into one dimension of queries,
which is cut into tiles; a record of numbers on the device says of each tile which queries of which row it has
(lopa_cuda.steps.tiles). The keys are cut into blocks, first the committed ones, then the window's, and dealt to
`num_splits` programs whose results are merged by their log-sum-exp. So rows of any lengths share a launch, and one
captured graph serves them all. Branches of one request read the same committed keys: from memory once, then from L2.

A block of committed keys is a page, whose number stands in the slot's row of the block table. It is loaded while the
block before it is computed, so that no load of keys waits for it.

Blocks that every query of a tile sees whole take the fast way: tensor descriptors, no masks. Pages in front of the
window do so always; the window's keys, which are all that a prompt has, do so in long passes. There blocks of the
window that no query of a tile sees are skipped, too. The rest takes pointers and masks, and comes last.

Shapes: S slots, P pages (in all, or of a slot), X positions of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lopa_cuda.kernels.launch import (
    KEEP,
    QUANTIZED_DTYPE,
    QUANTIZED_MAX,
    Quantize,
    operand,
    overlap,
    prefetch_l2,
    quantize_row,
    release_successor,
    start_after_predecessor,
)
from lopa_cuda.kernels.quantize import quantize_per_token
from lopa_cuda.machine import MACHINE
from quant.w8a8 import QuantizedActivation

BLOCK_QUERIES, WARPS = 64, 4  # a tile
MERGE_HEADS, MERGE_WARPS = 8, 8  # a program that merges; it need not see a whole token
ROW_MERGE_WARPS = 16
LOG2_E = 1.4426950408889634


@triton.jit
def _attend_block(acc, best, total, q, k, v, visible, scale, IS_MASKED: tl.constexpr):
    """One online-softmax step (base 2) over a block of keys [BK, H] and values [BK, H]."""
    score = tl.dot(operand(q), tl.trans(operand(k)))
    if IS_MASKED:
        score = tl.where(visible, score * scale, float("-inf"))
        highest = tl.maximum(best, tl.max(score, axis=1))
        # A query that has seen no key yet keeps -inf as its maximum; 0 stands in where it would give inf - inf.
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - finite[:, None])
    else:
        highest = tl.maximum(best, tl.max(score, axis=1) * scale)
        finite = highest
        weight = tl.exp2(score * scale - highest[:, None])  # one instruction, and the exponential
    decay = tl.exp2(best - finite)
    total = total * decay + tl.sum(weight, axis=1)
    acc = tl.dot(operand(weight.to(v.dtype)), operand(v), acc * decay[:, None])
    return acc, highest, total


@triton.jit
def _prefetch_keys(
    key_ptr, row_ptr, value_offset, position_stride, first, last, limit, program, num_programs,
    HEAD_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Pull this program's share of the split's committed keys and values of one row and KV head into L2."""
    element = tl.arange(0, 2 * BLOCK_KEYS)
    key = element % BLOCK_KEYS
    num_bytes = tl.full([2 * BLOCK_KEYS], HEAD_SIZE * 2, tl.int32)
    part = tl.where(element < BLOCK_KEYS, 0, value_offset)
    for block in range(first + program, last, num_programs):
        page_ptr = key_ptr + tl.load(row_ptr + block).to(tl.int64) * BLOCK_KEYS * position_stride
        in_page = tl.minimum(key, limit - 1 - block * BLOCK_KEYS)
        prefetch_l2((page_ptr + part + in_page * position_stride).to(tl.int64), num_bytes)


@triton.jit
def _attend_committed(
    acc, best, total, q, committed_desc, row_ptr, page, prefix_blocks, kv_head, num_pages, first, last, scale,
    HEAD_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend whole pages of committed keys in front of the window, which every query sees. page: the number of page
    `first`; that of `last` is returned beside the sums."""
    for block in tl.range(first, last, num_stages=STAGES):
        k = committed_desc.load([page * BLOCK_KEYS, kv_head * HEAD_SIZE])
        v = committed_desc.load([(num_pages + page) * BLOCK_KEYS, kv_head * HEAD_SIZE])
        page = tl.load(row_ptr + block + 1, mask=block + 1 < prefix_blocks, other=0)
        acc, best, total = _attend_block(acc, best, total, q, k, v, None, scale, False)
    return acc, best, total, page


@triton.jit
def _load_record(ptr):
    """A tile's numbers, in the order of lopa_cuda.steps.tiles."""
    first_token, num_entries, num_keys = tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)
    start, cached, slot = tl.load(ptr + 3), tl.load(ptr + 4), tl.load(ptr + 5)
    return first_token, num_entries, num_keys, start, cached, slot, tl.load(ptr + 6), tl.load(ptr + 7)


@triton.jit
def _blocks_of_split(split, num_blocks, start, BLOCK_KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """The split's first block, where its whole pages in front of the window end, and where it ends."""
    share = tl.cdiv(num_blocks, SPLITS)
    first = tl.minimum(split * share, num_blocks)
    last = tl.minimum(first + share, num_blocks)
    return first, tl.maximum(tl.minimum(last, start // BLOCK_KEYS), first), last


@triton.jit
def _seen_keys(horizon, is_query, start, num_keys):
    """How many of the window's keys every query of the tile sees, and how many any of them does."""
    reach = tl.minimum(tl.maximum(horizon - start, 0), num_keys)
    return tl.min(tl.where(is_query, reach, num_keys)), tl.max(tl.where(is_query, reach, 0))


@triton.jit
def _attend_own(
    acc, best, total, q, window_desc, horizon, is_query, start, num_keys, first_key, values, kv_head, prefix_blocks,
    first, full_end, last, scale, HEAD_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend blocks of the window's keys that every query sees. first_key: the first of all in the staging memory.
    values: how far they lie after their keys. first, last: the split's blocks. Returned beside the sums: where the
    blocks end that any query sees, and how many were attended here."""
    by_all, by_any = _seen_keys(horizon, is_query, start, num_keys)
    last = tl.minimum(last, tl.maximum(prefix_blocks + tl.cdiv(by_any, BLOCK_KEYS), full_end))
    own_first = tl.maximum(first - prefix_blocks, 0)
    whole_end = tl.minimum(last - prefix_blocks, by_all // BLOCK_KEYS)
    num_whole = tl.maximum(whole_end - own_first, 0)
    token = first_key + own_first * BLOCK_KEYS
    for key in tl.range(token, token + num_whole * BLOCK_KEYS, BLOCK_KEYS, num_stages=STAGES):
        k = window_desc.load([key, kv_head * HEAD_SIZE])
        v = window_desc.load([values + key, kv_head * HEAD_SIZE])
        acc, best, total = _attend_block(acc, best, total, q, k, v, None, scale, False)
    return acc, best, total, last, num_whole


@triton.jit
def _attend_edge(
    acc, best, total, q, key_ptr, own_ptr, row_ptr, page, horizon, start, num_keys, cached, prefix_blocks, num_whole,
    first, last, scale, committed_kv, committed_position, window_kv, window_token,
    HEAD_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Attend the rest: the edge of the prefix, keys cached after the window, the window without its `num_whole` blocks
    that this split has done. page: the number of page `first`."""
    channel = tl.arange(0, HEAD_SIZE)[None, :]
    for block in tl.range(first, last, num_stages=2):
        is_own = block >= prefix_blocks
        first_key = (block - tl.where(is_own, prefix_blocks - num_whole, 0)) * BLOCK_KEYS
        in_block = tl.arange(0, BLOCK_KEYS)
        key = first_key + in_block
        is_key = (key < start) | ((key >= start + num_keys) & (key < cached))
        is_key = tl.where(is_own, key < num_keys, is_key)
        page_ptr = key_ptr + page.to(tl.int64) * BLOCK_KEYS * committed_position
        block_ptr = tl.where(is_own, own_ptr + first_key * window_token, page_ptr)
        at = block_ptr + in_block[:, None] * tl.where(is_own, window_token, committed_position)
        page = tl.load(row_ptr + block + 1, mask=block + 1 < prefix_blocks, other=0)
        k = tl.load(at + channel, mask=is_key[:, None], other=0.0)
        v = tl.load(at + tl.where(is_own, window_kv, committed_kv) + channel, mask=is_key[:, None], other=0.0)
        reach = tl.where(is_own, horizon - start, 2147483647)
        visible = is_key[None, :] & (key[None, :] < reach[:, None])
        acc, best, total = _attend_block(acc, best, total, q, k, v, visible, scale, True)
    return acc, best, total


@triton.jit
def _store_part(
    acc, best, total, out_ptr, part_ptr, log_sum_ptr, flat, log_sum_at, is_query, split, part_stride,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """This split's result: final where it is the only one, else with the logarithm of its weights' sum."""
    acc *= (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    if SPLITS == 1:
        tl.store(out_ptr + flat, acc.to(tl.bfloat16), mask=is_query[:, None])
    else:
        log_sum = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(part_ptr + split.to(tl.int64) * part_stride + flat, acc, mask=is_query[:, None], eviction_policy=KEEP)
        tl.store(log_sum_ptr + log_sum_at, log_sum, mask=is_query, eviction_policy=KEEP)


@triton.jit
def _attention_kernel(
    q_ptr, committed_desc, committed_ptr, window_desc, window_ptr, out_ptr, part_ptr, log_sum_ptr,
    tile_ptr, horizon_ptr, table_ptr, scale, num_pages, num_staged, num_heads, part_stride, log_sum_stride,
    committed_kv, committed_position, window_kv, window_token,
    RECORD: tl.constexpr, TABLE_ROW: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    IS_LONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    release_successor(PDL)
    record = tile_ptr + tile * RECORD
    first_token, num_entries, num_keys, start, cached, slot, first_query, first_key = _load_record(record)
    if num_entries == 0:  # more tiles than this step needs
        return
    query = first_query + tl.arange(0, BLOCK_QUERIES)
    token, head = first_token + query // GROUP, kv_head * GROUP + query % GROUP
    is_query = query < GROUP * num_entries
    horizon = tl.load(horizon_ptr + token, mask=is_query, other=0).to(tl.int32)

    limit = tl.maximum(start, cached)
    prefix_blocks = tl.cdiv(limit, BLOCK_KEYS)
    num_blocks = prefix_blocks + tl.cdiv(num_keys, BLOCK_KEYS)
    first, full_end, last = _blocks_of_split(split, num_blocks, start, BLOCK_KEYS, SPLITS)
    row_ptr = table_ptr + slot * TABLE_ROW
    page = tl.load(row_ptr + first, mask=first < prefix_blocks, other=0)
    key_ptr = committed_ptr + kv_head * HEAD_SIZE
    if PDL:
        end = tl.minimum(last, prefix_blocks)
        _prefetch_keys(
            key_ptr, row_ptr, committed_kv, committed_position, first, end, limit, first_query // BLOCK_QUERIES,
            tl.cdiv(GROUP * num_entries, BLOCK_QUERIES), HEAD_SIZE, BLOCK_KEYS,
        )  # fmt: skip

    acc = tl.zeros([BLOCK_QUERIES, HEAD_SIZE], tl.float32)
    best = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    channel = tl.arange(0, HEAD_SIZE)[None, :]
    flat = (token * num_heads + head)[:, None] * HEAD_SIZE + channel
    start_after_predecessor(PDL)
    q = tl.load(q_ptr + flat, mask=is_query[:, None], other=0.0)
    acc, best, total, page = _attend_committed(
        acc, best, total, q, committed_desc, row_ptr, page, prefix_blocks, kv_head, num_pages, first, full_end, scale,
        HEAD_SIZE, BLOCK_KEYS, STAGES,
    )  # fmt: skip
    num_whole = 0
    if IS_LONG:
        acc, best, total, last, num_whole = _attend_own(
            acc, best, total, q, window_desc, horizon, is_query, start, num_keys, first_key, num_staged, kv_head,
            prefix_blocks, first, full_end, last, scale, HEAD_SIZE, BLOCK_KEYS, STAGES,
        )  # fmt: skip
    own_ptr = window_ptr + first_key.to(tl.int64) * window_token + kv_head * HEAD_SIZE
    acc, best, total = _attend_edge(
        acc, best, total, q, key_ptr, own_ptr, row_ptr, page, horizon, start, num_keys, cached, prefix_blocks,
        num_whole, full_end, last - num_whole, scale, committed_kv, committed_position, window_kv, window_token,
        HEAD_SIZE, BLOCK_KEYS,
    )  # fmt: skip
    log_sum_at = split * log_sum_stride + token * num_heads + head
    _store_part(
        acc, best, total, out_ptr, part_ptr, log_sum_ptr, flat, log_sum_at, is_query, split, part_stride, SPLITS
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    part_ptr, log_sum_ptr, out_ptr, out_scale_ptr, num_heads,
    part_stride, log_sum_stride, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    QUANTIZED_MAX: tl.constexpr, IS_INT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    release_successor(PDL)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, HEAD_SIZE)[None, :]
    is_head = head < num_heads
    offset = token * num_heads * HEAD_SIZE + head[:, None] * HEAD_SIZE + channel
    start_after_predecessor(PDL)
    best = tl.full([HEADS], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        log_sum_at = log_sum_ptr + split * log_sum_stride + token * num_heads + head
        best = tl.maximum(best, tl.load(log_sum_at, mask=is_head, other=float("-inf")))
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros([HEADS], tl.float32)
    y = tl.zeros([HEADS, HEAD_SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        log_sum_at = log_sum_ptr + split * log_sum_stride + token * num_heads + head
        weight = tl.exp2(tl.load(log_sum_at, mask=is_head, other=float("-inf")) - best)
        total += weight
        y += weight[:, None] * tl.load(part_ptr + offset, mask=is_head[:, None], other=0.0)
        part_ptr += part_stride  # all parts together may have more values than int32 counts
    y *= (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    y = tl.reshape(y, [HEADS * HEAD_SIZE]).to(tl.bfloat16)
    column = tl.program_id(1) * HEADS * HEAD_SIZE + tl.arange(0, HEADS * HEAD_SIZE)
    mask = column < num_heads * HEAD_SIZE
    offset = token * num_heads * HEAD_SIZE + column
    if QUANTIZED_MAX > 0:
        quantized, scale = quantize_row(y.to(tl.float32), QUANTIZED_MAX, IS_INT)
        tl.store(out_ptr + offset, quantized, mask=mask, eviction_policy=KEEP)
        tl.store(out_scale_ptr + token, scale)
    else:
        tl.store(out_ptr + offset, y, mask=mask, eviction_policy=KEEP)


def choose_splits(num_kv_heads: int, num_queries: int, head_size: int) -> tuple[int, int]:
    """Choose by shape alone: splits, which fill the device where the tiles alone do not, and stages. Queries: those of
    all rows and one KV head."""
    programs = triton.cdiv(num_queries, BLOCK_QUERIES) * num_kv_heads
    known = MACHINE.attention
    many = max(1, known.split_programs // programs), known.stages
    splits, stages = next(((splits, stages) for most, splits, stages in known.few_programs if programs <= most), many)
    return splits, min(stages, known.stages_of_256) if head_size == 256 else stages


def window_attention(
    q_TNH: Tensor, committed_2PXKH: Tensor, window_2TKH: Tensor, *, table_SP: Tensor, tiles_N8: Tensor,
    horizon_T: Tensor, num_splits: int | None = None, is_long: bool | None = None, quantize: Quantize | None = None,
) -> Tensor | QuantizedActivation:  # fmt: skip
    """Attention of every row's queries over [its slot's committed keys | its own window]; [T, N H], bf16 or quantized.

    Visible keys: committed positions below start or in [start + num_keys, cached); own window keys j < num_keys with
    start + j < horizon (lopa_cuda.ops.plain.visible_keys). A query that sees no key gives 0. committed: pages of X
    positions, a power of 2. window: of as many tokens as q, or more where tiles say that their keys lie elsewhere.
    table: int32, the pages of each slot; only those of committed keys are looked at. tiles: int32 records as
    lopa_cuda.steps.tiles describes them, of BLOCK_QUERIES queries; what is in no tile is not written. horizon: int32.
    num_splits: parts of the key range computed in parallel. is_long: whether whole blocks of the window's keys are
    loaded as pages are. The shape chooses where these are None.
    """
    num_tokens, num_heads, head_size = q_TNH.shape
    num_kv_heads = window_2TKH.shape[-2]
    group, page_size = num_heads // num_kv_heads, committed_2PXKH.shape[2]
    assert len(horizon_T) == num_tokens and q_TNH.is_contiguous() and q_TNH.dtype == torch.bfloat16
    numbers = tiles_N8, horizon_T, table_SP
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in numbers) and committed_2PXKH.is_contiguous()
    is_long = num_tokens >= MACHINE.attention.long_tokens if is_long is None else is_long
    splits, stages = choose_splits(num_kv_heads, group * num_tokens, head_size)
    splits = splits if num_splits is None else num_splits
    out = torch.empty((num_tokens, num_heads * head_size), dtype=torch.bfloat16, device=q_TNH.device)
    part, log_sum = _parts(q_TNH, splits)
    _attention_kernel[(len(tiles_N8), num_kv_heads, splits)](
        q_TNH, _blocks(committed_2PXKH, page_size), committed_2PXKH,
        _blocks(window_2TKH, page_size) if is_long else None, window_2TKH, out, part, log_sum, tiles_N8, horizon_T,
        table_SP,
        scale=head_size**-0.5 * LOG2_E, num_pages=committed_2PXKH.shape[1], num_staged=window_2TKH.shape[1],
        num_heads=num_heads, part_stride=q_TNH.numel(), log_sum_stride=num_tokens * num_heads,
        committed_kv=committed_2PXKH.stride(0), committed_position=committed_2PXKH.stride(2),
        window_kv=window_2TKH.stride(0), window_token=window_2TKH.stride(1),
        RECORD=tiles_N8.stride(0), TABLE_ROW=table_SP.stride(0),
        GROUP=group, HEAD_SIZE=head_size, BLOCK_QUERIES=BLOCK_QUERIES, BLOCK_KEYS=page_size,
        SPLITS=splits, STAGES=stages, IS_LONG=is_long, num_warps=WARPS, **overlap(),
    )  # fmt: skip
    if part is None or log_sum is None:
        return out if quantize is None else quantize_per_token(out, quantize)
    return _merge(part, log_sum, out, quantize)


def _blocks(keys: Tensor, length: int) -> TensorDescriptor:
    """Descriptor of blocks of so many positions and one head, of contiguous keys and values [..., K, H]."""
    num_kv_heads, head_size = keys.shape[-2:]
    return TensorDescriptor.from_tensor(keys.view(-1, num_kv_heads * head_size), [length, head_size])


def _parts(q_TNH: Tensor, splits: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Memory in which splits leave their results, and the logarithms of their weights' sums."""
    if splits == 1:
        return None, None
    part = torch.empty((splits, *q_TNH.shape), dtype=torch.float32, device=q_TNH.device)
    return part, torch.empty((splits, *q_TNH.shape[:2]), dtype=torch.float32, device=q_TNH.device)


def _merge(part: Tensor, log_sum: Tensor, out: Tensor, quantize: Quantize | None) -> Tensor | QuantizedActivation:
    splits, num_tokens, num_heads, head_size = part.shape
    scale_T = None
    if quantize is not None:
        out = torch.empty_like(out, dtype=QUANTIZED_DTYPE[quantize])
        scale_T = torch.empty(num_tokens, dtype=torch.float32, device=out.device)
    heads, warps = triton.next_power_of_2(num_heads), ROW_MERGE_WARPS
    if quantize is None:
        heads, warps = min(MERGE_HEADS, heads), MERGE_WARPS
    _merge_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        part, log_sum, out, scale_T, num_heads, part.stride(0), log_sum.stride(0),
        HEADS=heads, HEAD_SIZE=head_size, SPLITS=splits,
        QUANTIZED_MAX=QUANTIZED_MAX.get(quantize, 0.0), IS_INT=quantize == "int8", num_warps=warps, **overlap(),
    )  # fmt: skip
    return out if scale_T is None else QuantizedActivation(out, scale_T)
