"""What an operator reads and writes of device memory, counted from its arguments and results."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten

from sim.calls import Call, npu_tensors

_ATTENTION = "npu::npu_fused_infer_attention_score"
_WRITE_KV = "npu::npu_scatter_pa_kv_cache"
_ROTATE_AND_WRITE = "lopa::rotate_and_write"
_PICK_ROWS = ("aten::embedding", "aten::index_select", "aten::gather")


class Traffic(NamedTuple):
    """kv: the part of `read` that attention reads of the caches, once for every virtual row."""

    op: str
    read: int
    written: int
    kv: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written


def of(call: Call, result: Any) -> Traffic:
    given = call.npu
    results = [tensor for tensor in npu_tensors(result) if not any(tensor is one for one in given)]
    written = _bytes(results) + _bytes(list(call.written()))
    if call.name.startswith(_ATTENTION):
        keys, values = given[1:3]
        ends = call.kwargs.get("actual_seq_kvlen") or call.kwargs["actual_seq_lengths_kv"]
        visible = sum(ends) * call.kwargs["num_key_value_heads"] * given[0].shape[-1] * keys.element_size() * 2
        others = [tensor for tensor in given if tensor is not keys and tensor is not values]
        return Traffic(call.name, _bytes(others) + visible, written, visible)
    if call.name.startswith(_WRITE_KV):
        return Traffic(call.name, _bytes([*given[:2], given[4]]), _bytes(given[:2]))
    if call.name == _ROTATE_AND_WRITE:
        qkv, cos, sin, _, _, slot = given
        return Traffic(call.name, _bytes([qkv, cos, sin, slot]), _bytes([qkv]))
    if call.name.startswith(_PICK_ROWS):
        return Traffic(call.name, written + _bytes(given[1:]), written)
    return Traffic(call.name, _bytes(given), written)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_flatten(tensors)[0])
