"""Twin of the fused attention, restricted to the one form this engine uses: TND, paged, no mask.

Visibility is said by lengths alone. A virtual row is a run of queries that see the same keys: the first `kv length`
positions of the pages in its row of the block table. docs/ascend.md derives block-causal attention from that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model import attention
from lopa_ascend.ops.rows import MOST_ROWS
from lopa_ascend.ops.rules import refuse, require

V1 = "npu_fused_infer_attention_score"
V2 = "npu_fused_infer_attention_score_v2"
_MOST_TOKENS = {V1: 65536, V2: 1 << 20}
_MOST_HEADS = 256
_LARGEST_GROUP = 64


def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    hardware_types: bool = True,
) -> tuple[Tensor, Tensor]:
    """(attention [T, heads, D], empty). Query lengths are cumulative, KV lengths are plain because the KV is paged."""
    heads = num_query_heads, num_key_value_heads or num_query_heads
    _check_mode(V2, input_layout, sparse_mode, atten_mask)
    _check_query(V2, query, key, value, heads, hardware_types)
    ends, lengths = _check_lengths(V2, query, actual_seq_qlen, actual_seq_kvlen)
    pages = _check_pages(V2, key, block_table, lengths, block_size, heads[1] * query.shape[-1])
    return _attend(query, key, value, ends, lengths, pages, heads[1], softmax_scale), torch.empty(0)


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    hardware_types: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same operator under its first names."""
    heads = num_heads, num_key_value_heads or num_heads
    _check_mode(V1, input_layout, sparse_mode, atten_mask)
    _check_query(V1, query, key, value, heads, hardware_types)
    ends, lengths = _check_lengths(V1, query, actual_seq_lengths, actual_seq_lengths_kv)
    pages = _check_pages(V1, key, block_table, lengths, block_size, heads[1] * query.shape[-1])
    return _attend(query, key, value, ends, lengths, pages, heads[1], scale), torch.empty(0)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: list[int],
    lengths: list[int],
    pages: list[Tensor],
    num_kv_heads: int,
    scale: float,
) -> Tensor:
    """Row by row, so that a row's result cannot depend on its neighbours."""
    out = torch.empty_like(query)
    head_size = query.shape[-1]
    for start, end, length, page in zip([0, *ends], ends, lengths, pages, strict=False):
        if start == end:
            continue
        if length == 0:
            out[start:end] = 0
            continue
        keys, values = (
            cache.index_select(0, page).view(-1, num_kv_heads, head_size)[:length].transpose(0, 1)[None]
            for cache in (key, value)
        )
        attended = attention(query[None, start:end].transpose(1, 2), keys, values, None, scale)
        out[start:end] = attended[0].transpose(0, 1)
    return out


def _check_mode(op: str, input_layout: str, sparse_mode: int, atten_mask: Tensor | None) -> None:
    refuse(op, input_layout=None if input_layout == "TND" else input_layout)
    require(sparse_mode in (0, 3, 4), op, "TND takes sparse_mode 0, 3 or 4", sparse_mode)
    require(sparse_mode != 0 or atten_mask is None, op, "TND with sparse_mode 0 takes no mask", atten_mask)
    refuse(op, sparse_mode=sparse_mode or None)


def _check_lengths(
    op: str, query: Tensor, query_ends: Sequence[int] | None, kv_lengths: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    require(bool(query_ends) and bool(kv_lengths), op, "TND needs query and KV lengths", (query_ends, kv_lengths))
    assert query_ends is not None and kv_lengths is not None
    ends, lengths = [int(end) for end in query_ends], [int(length) for length in kv_lengths]
    rising = all(end >= before for before, end in zip([0, *ends], ends, strict=False))
    require(rising, op, "query lengths are cumulative in TND", ends)
    require(ends[-1] == query.shape[0], op, f"the last query length is T={query.shape[0]}", ends[-1])
    require(len(lengths) == len(ends), op, f"there is one KV length for each of {len(ends)} rows", len(lengths))
    require(min(lengths) >= 0, op, "KV lengths are not negative", lengths)
    require(len(ends) <= MOST_ROWS, op, f"there are at most {MOST_ROWS} rows", len(ends))
    return ends, lengths


def _check_query(
    op: str, query: Tensor, key: Tensor, value: Tensor, heads: tuple[int, int], hardware_types: bool
) -> None:
    num_heads, num_kv_heads = heads
    require(query.dim() == 3, op, "query is [T, heads, D] in TND", query)
    require(query.shape[0] <= _MOST_TOKENS[op], op, f"T is at most {_MOST_TOKENS[op]}", query.shape[0])
    require(query.shape[1] == num_heads, op, f"the query has num_heads={num_heads} heads", query)
    require(0 < num_heads <= _MOST_HEADS, op, f"there are 1 to {_MOST_HEADS} heads", num_heads)
    grouped = num_heads % num_kv_heads == 0 and num_heads // num_kv_heads <= _LARGEST_GROUP
    require(grouped, op, f"query heads are a multiple of KV heads, at most {_LARGEST_GROUP}", heads)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require(tensor.is_contiguous(), op, f"{name} is contiguous", tensor)
        require(tensor.dtype == query.dtype, op, f"{name} has the query's dtype", tensor)
    require(key.shape == value.shape, op, "key and value have the same shape", (key, value))
    if hardware_types:
        require(query.dtype == torch.bfloat16, op, "TND is bfloat16 only", query)
        require(query.shape[-1] == 128, op, "head size is 128 in TND with equal key and value heads", query.shape[-1])


def _check_pages(
    op: str, cache: Tensor, block_table: Tensor | None, lengths: list[int], block_size: int, width: int
) -> list[Tensor]:
    """The pages that each row reads."""
    refuse(op, unpaged="block_table=None" if block_table is None else None)
    assert block_table is not None
    require(block_size in (128, 256, 384, 512), op, "block_size is 128, 256, 384 or 512 with Q_S > 1", block_size)
    flat = cache.dim() == 3 and tuple(cache.shape[1:]) == (block_size, width)
    headed = cache.dim() == 4 and cache.shape[1] * cache.shape[3] == width and cache.shape[2] == block_size
    require(flat or headed, op, f"cache is [pages, {block_size}, {width}] or [pages, heads, {block_size}, D]", cache)
    require(not flat or width <= 65535, op, "KV heads times D is at most 65535 in a 3-D cache", width)
    refuse(op, cache=cache if headed and cache.shape[1] > 1 else None)
    table = block_table.dtype == torch.int32 and block_table.dim() == 2 and block_table.shape[0] == len(lengths)
    require(table, op, f"block_table is int32 with {len(lengths)} rows", block_table)
    num_pages = [-(-length // block_size) for length in lengths]
    wide = max(num_pages) <= block_table.shape[1]
    require(wide, op, f"block_table has a column for each of {max(num_pages)} pages of the longest row", block_table)
    pages = [row[:count] for row, count in zip(block_table.long(), num_pages, strict=True)]
    used = torch.cat(pages)
    inside = used.numel() == 0 or (int(used.min()) >= 0 and int(used.max()) < cache.shape[0])
    require(inside, op, f"page ids lie in [0, {cache.shape[0] - 1}]", block_table)
    return pages
