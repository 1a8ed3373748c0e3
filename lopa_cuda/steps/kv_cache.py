"""Static KV cache: committed keys and values by request slot, and this step's window by token.

Every forward pre-writes each row's window; only the winner's commit span is later copied behind the slot's committed
prefix. Both tensors have the layer first and keys beside values, so a commit span of all layers is one strided copy.

Shapes: L layers, 2 (key, value), S positions, T window tokens (the pass's entries), K KV heads of this rank, H head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StaticKVCache:
    """committed [L, 2, slots, S, K, H]; staging [L, 2, T, K, H], the KV that the pass being run pre-writes.

    Captured graphs hold the address of one staging memory of `captured_tokens`, which therefore never moves; a pass
    that runs as it is gets one of its own.
    """

    def __init__(
        self, *, num_layers: int, num_slots: int, max_model_len: int, num_kv_heads: int, head_size: int,
        dtype: torch.dtype, device: torch.device, captured_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.max_model_len = max_model_len
        self.num_slots = num_slots
        self._per_layer = num_layers, 2
        self._per_position = num_kv_heads, head_size
        shape = (*self._per_layer, num_slots, max_model_len, *self._per_position)
        self.committed = torch.zeros(shape, dtype=dtype, device=device)
        self.captured_staging = self._new_staging(captured_tokens).zero_()
        self.staging = self.captured_staging

    def use_staging(self, num_tokens: int, *, is_captured: bool) -> None:
        """Point `staging` at memory for this many tokens."""
        if is_captured:
            assert num_tokens <= self.captured_staging.shape[2], "buckets end where the captured staging memory does"
            self.staging = self.captured_staging
        else:
            self.staging = self._new_staging(num_tokens)

    def prewrite(self, layer: int, key_TKH: Tensor, value_TKH: Tensor) -> None:
        num_tokens = key_TKH.shape[0]
        self.staging[layer, 0, :num_tokens] = key_TKH
        self.staging[layer, 1, :num_tokens] = value_TKH

    @property
    def num_bytes(self) -> int:
        num_elements = self.committed.numel() + self.captured_staging.numel()
        return num_elements * self.committed.element_size()

    def _new_staging(self, num_tokens: int) -> Tensor:
        return self.committed.new_empty((*self._per_layer, num_tokens, *self._per_position))
