"""Paged KV memory: the tensors, and the book of which row has which pages."""

from lopa_ascend.kv.kv_cache import PagedKVCache, bytes_per_page
from lopa_ascend.kv.pages import (
    PAGE_SIZE,
    BranchCapacity,
    PageBook,
    most_pages,
    most_rows,
    most_shift_entries,
    pages_for,
    why_not_decoded,
)

__all__ = [
    "PAGE_SIZE",
    "BranchCapacity",
    "PageBook",
    "PagedKVCache",
    "bytes_per_page",
    "most_pages",
    "most_rows",
    "most_shift_entries",
    "pages_for",
    "why_not_decoded",
]
