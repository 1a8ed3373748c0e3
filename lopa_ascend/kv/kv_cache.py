"""Paged KV memory on the device: the tensors behind the page numbers of `pages`.

Shapes: L layers, P pages, K KV heads of this rank, H head size. A layer's keys are one contiguous [P, PAGE_SIZE, K, H],
as the write and the attention want them; with one KV head a rank those are the same bytes as the attention's fastest
layout. Every cache is a tensor of its own, not a view into a common one: a graph compiler would turn a write through a
view into a copy of the whole. It is a parameter, so that a compiler takes its address for fixed. The element type is
all that is known of precision: int8 would need a scale a slot beside it, and nothing else here would change.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopa_ascend.kv.pages import PAGE_SIZE


def bytes_per_page(num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    return 2 * num_layers * PAGE_SIZE * num_kv_heads * head_size * dtype.itemsize


class PagedKVCache:
    """layers: (keys, values) of each."""

    def __init__(
        self, *, num_layers: int, num_pages: int, num_kv_heads: int, head_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.num_pages = num_pages
        self.num_bytes = num_pages * bytes_per_page(num_layers, num_kv_heads, head_size, dtype)
        shape = num_pages, PAGE_SIZE, num_kv_heads, head_size

        def zeros() -> Tensor:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.layers: list[tuple[Tensor, Tensor]] = [(zeros(), zeros()) for _ in range(num_layers)]

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0][0].dtype

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for pair in self.layers for tensor in pair]

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy pages (from, to) in all layers, by views: index tensors would have to be sent to the device."""
        for source, target in copies:
            for keys, values in self.layers:
                keys[target].copy_(keys[source])
                values[target].copy_(values[source])

    def read(self, pages: list[int]) -> Tensor:
        """Return a copy [L, 2, S, K, H] of these pages, one after the other, for tests."""
        pairs = (torch.stack((keys[pages], values[pages])) for keys, values in self.layers)
        return torch.stack([pair.flatten(1, 2) for pair in pairs])
