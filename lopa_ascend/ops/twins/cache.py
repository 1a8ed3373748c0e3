"""Twin of the write into the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_ascend.ops.rules import refuse, require


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write key, value [T, heads, D] at flat slots [T] of caches [pages, page size, heads, D]. Default mode: PA_NZ."""
    op = "npu_scatter_pa_kv_cache"
    require(cache_mode in (None, "Norm", "PA_NZ"), op, "cache_mode is None, Norm or PA_NZ", cache_mode)
    refuse(op, cache_mode=cache_mode if cache_mode == "PA_NZ" else None)
    require(key.dim() == 3 and value.shape == key.shape, op, "key and value are [T, heads, D]", (key, value))
    for name, tensor in (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        require(tensor.is_contiguous(), op, f"{name} is contiguous", tensor)
        require(tensor.dtype == key.dtype, op, f"{name} has the key's dtype", tensor)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        fits = cache.dim() == 4 and cache.shape[2:] == key.shape[1:]
        require(fits, op, f"{name} is [pages, page size, {key.shape[1]}, {key.shape[2]}] in mode Norm", cache)
    require(key_cache.shape == value_cache.shape, op, "both caches have the same pages", (key_cache, value_cache))
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    _check_slots(op, slot_mapping, key.shape[0], num_slots)
    slot = slot_mapping.long()
    key_cache.view(num_slots, *key.shape[1:]).index_copy_(0, slot, key)
    value_cache.view(num_slots, *key.shape[1:]).index_copy_(0, slot, value)


def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """ATB's form of the same write in mode Norm, which every release has; it wants int32 slots."""
    require(slot_indices.dtype == torch.int32, "_npu_reshape_and_cache", "slot_indices is int32", slot_indices)
    npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_indices, cache_mode="Norm")


def _check_slots(op: str, slot_mapping: Tensor, num_tokens: int, num_slots: int) -> None:
    require(slot_mapping.dtype in (torch.int32, torch.int64), op, "slot_mapping is int32 or int64", slot_mapping)
    fits = tuple(slot_mapping.shape) == (num_tokens,) and slot_mapping.is_contiguous()
    require(fits, op, f"slot_mapping is contiguous with shape [{num_tokens}]", slot_mapping)
    if num_tokens == 0:
        return
    first, last = (int(bound) for bound in slot_mapping.aminmax())
    inside = first >= 0 and last < num_slots
    require(inside, op, f"slots lie in [0, {num_slots - 1}]; padding goes to a dummy page, not to -1", (first, last))
    unique = slot_mapping.unique().numel()
    require(unique == num_tokens, op, "slots are unique", f"{num_tokens - unique} repeated slots")
