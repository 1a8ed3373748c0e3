"""KV cache: committed keys and values in pages, and this step's window by token.

Every forward pre-writes each row's window; only the winner's commit span is later copied to the pages of its request.
Both tensors have the layer first and keys beside values, so a commit span of all layers is one strided copy. Which
pages are whose the host keeps in a table (common.runtime); the device has a copy of it, sent when it has changed.

Shapes: L layers, 2 (key, value), P pages, S slots, T window tokens (the pass's entries), K KV heads of this rank, H
head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.decoding import CommitSpan, Int, StepPlan
from common.runtime import PagePool, PageTable, Upload, pages_for

if TYPE_CHECKING:
    from lopa_cuda.parallel.peer_staging import PeerStaging

PAGE_SIZE = 64  # positions: a block of keys of the attention kernel


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """captured_tokens: tokens of the largest pass that is captured; 0: none is."""

    num_layers: int
    num_slots: int
    max_model_len: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    captured_tokens: int = 0

    @property
    def pages_of_slot(self) -> int:
        return pages_for(self.max_model_len, PAGE_SIZE)

    @property
    def most_pages(self) -> int:
        """Pages of all requests at their longest."""
        return self.num_slots * self.pages_of_slot

    @property
    def bytes_per_page(self) -> int:
        return PAGE_SIZE * self.bytes_per_position

    @property
    def staging_bytes(self) -> int:
        return self.captured_tokens * self.bytes_per_position

    @property
    def staging_shape(self) -> tuple[int, ...]:
        """Shape of the staging memory of captured passes."""
        return self.num_layers, 2, self.captured_tokens, self.num_kv_heads, self.head_size

    @property
    def bytes_per_position(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize


class PagedKVCache:
    """committed [L, 2, P, PAGE_SIZE, K, H]; staging [L, 2, T, K, H], the KV that the pass being run pre-writes;
    table_SP int32: the page of every PAGE_SIZE positions of a slot, on the device.

    Captured graphs hold the addresses of the committed KV, the table and one staging memory of `captured_tokens`, which
    therefore never move; a pass that runs as it is gets staging memory of its own. peers: where branch-parallel ranks
    write the captured staging memory for one another; None: nobody else can.
    """

    def __init__(
        self, sizes: CacheSizes, num_pages: int, device: torch.device, peers: PeerStaging | None = None
    ) -> None:
        self.max_model_len = sizes.max_model_len
        self.bytes_per_position = sizes.bytes_per_position
        self._per_layer = sizes.num_layers, 2
        self._per_position = sizes.num_kv_heads, sizes.head_size
        shape = (*self._per_layer, num_pages, PAGE_SIZE, *self._per_position)
        self.committed = torch.zeros(shape, dtype=sizes.dtype, device=device)
        self.peers = peers
        self.captured_staging = peers.staging if peers else self._new_staging(sizes.captured_tokens).zero_()
        self.staging = self.captured_staging
        self._table = Upload((sizes.num_slots, sizes.pages_of_slot), device)
        self.table_SP = self._table.device
        self.pool = PagePool(num_pages)
        self._pages = PageTable(self.pool, self._table.host, PAGE_SIZE)
        self.prefixes = self._pages.prefixes

    def open_step(self, plan: StepPlan) -> None:
        """Forget requests that have ended, and send the table if it has changed; before the pass."""
        if self._pages.open_step(plan):
            self._table.send()

    def prepare_commits(self, plan: StepPlan) -> None:
        """Take pages for what becomes final, after the launch, while the device computes. The pass may be reading the
        table, but only entries that do not change."""
        self._pages.prepare_commits(plan)

    def positions(self, span: CommitSpan) -> Int:
        """Positions of a span of the plan that was prepared last, counted through all pages."""
        return self._pages.positions(span)

    def use_staging(self, num_tokens: int, *, is_captured: bool) -> None:
        """Point `staging` at memory for this many tokens."""
        if is_captured:
            assert num_tokens <= self.captured_staging.shape[2], "buckets end where the captured staging memory does"
            self.staging = self.captured_staging
        else:
            self.staging = self._new_staging(num_tokens)

    @property
    def dtype(self) -> torch.dtype:
        return self.committed.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """What can be given back and taken again: peers write the other staging memory."""
        return [self.committed] if self.peers else [self.committed, self.captured_staging]

    @property
    def num_bytes(self) -> int:
        num_elements = self.committed.numel() + self.captured_staging.numel()
        return num_elements * self.committed.element_size()

    def _new_staging(self, num_tokens: int) -> Tensor:
        return self.committed.new_empty((*self._per_layer, num_tokens, *self._per_position))
