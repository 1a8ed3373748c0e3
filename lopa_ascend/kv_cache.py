"""Paged KV memory on the device: the tensors behind the page numbers of `pages`.

Shapes: L layers, 2 (key, value), P pages, K KV heads of this rank, H head size. A layer's keys are one contiguous
[P, PAGE_SIZE, K, H], as the write and the attention want them; with one KV head a rank those are the same bytes as the
attention's fastest layout. The element type is the cache's only knowledge of precision: int8 would need a scale a slot
beside it, and nothing else here would change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lopa_ascend.pages import PAGE_SIZE


def bytes_per_page(num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    return 2 * num_layers * PAGE_SIZE * num_kv_heads * head_size * dtype.itemsize


class PagedKVCache:
    def __init__(
        self, *, num_layers: int, num_pages: int, num_kv_heads: int, head_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        shape = num_layers, 2, num_pages, PAGE_SIZE, num_kv_heads, head_size
        self.pages = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_pages(self) -> int:
        return self.pages.shape[2]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [P, PAGE_SIZE, K, H] each."""
        return self.pages[index, 0], self.pages[index, 1]

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """(from, to), in all layers. Views instead of index tensors: nothing has to be sent to the device."""
        for source, target in copies:
            self.pages[:, :, target].copy_(self.pages[:, :, source])

    @property
    def num_bytes(self) -> int:
        return self.pages.numel() * self.pages.element_size()
