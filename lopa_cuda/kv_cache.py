"""Static KV cache: committed keys and values by request slot, and this step's window by row.

Every forward pre-writes each row's window; only the winner's commit span is later copied behind the slot's committed
prefix. Both tensors have the layer first and keys beside values, so a commit span of all layers is one strided copy.

Shapes: L layers, 2 (key, value), S positions, W window entries, K KV heads of this rank, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StaticKVCache:
    """committed [L, 2, slots, S, K, H]; window [L, 2, rows, W, K, H], grown when a step needs more."""

    def __init__(
        self, *, num_layers: int, num_slots: int, max_model_len: int, num_kv_heads: int, head_size: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._per_layer = num_layers, 2
        self._per_position = num_kv_heads, head_size
        shape = (*self._per_layer, num_slots, max_model_len, *self._per_position)
        self.committed = torch.zeros(shape, dtype=dtype, device=device)
        self.window = torch.zeros((*self._per_layer, 0, 0, *self._per_position), dtype=dtype, device=device)

    def reserve_window(self, num_rows: int, width: int) -> None:
        rows, entries = self.window.shape[2:4]
        if num_rows > rows or width > entries:
            shape = (*self._per_layer, max(rows, num_rows), max(entries, width), *self._per_position)
            self.window = self.committed.new_zeros(shape)

    def prewrite(self, layer: int, key_RWKH: Tensor, value_RWKH: Tensor) -> None:
        num_rows, width = key_RWKH.shape[:2]
        self.window[layer, 0, :num_rows, :width] = key_RWKH
        self.window[layer, 1, :num_rows, :width] = value_RWKH

    def window_span(self, row: int, length: int) -> Tensor:
        """The first `length` entries of a row's window: [L, 2, length, K, H]."""
        return self.window[:, :, row, :length]

    def commit(self, slot: int, start: int, span: Tensor) -> None:
        self.committed[:, :, slot, start : start + span.shape[2]] = span

    @property
    def num_bytes(self) -> int:
        return (self.committed.numel() + self.window.numel()) * self.committed.element_size()
