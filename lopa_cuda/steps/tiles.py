"""How attention's kernel sees the rows of a pass: as tiles.

The entries of a row times the query heads of a KV head are its queries. A *tile* is up to `queries` of them, and its
record says everything about its row:

    first token, entries, keys, start, cached, slot (StepPlan's names), the tile's first query, first key

The first key is a token of the staging memory: the row's first token, unless the pass is cut over ranks
(lopa_cuda.steps.slices), where the rows of a rank are pieces that see their whole rows' keys.

A pass has room for a number of tiles that its bucket of tokens fixes. Tiles that a step does not need have no entries.

Shapes: R rows, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from common.decoding import NUM_UPLOADED_FIELDS, Int, RowField

RECORD = 8
_FIRST_QUERY, _FIRST_KEY = NUM_UPLOADED_FIELDS, NUM_UPLOADED_FIELDS + 1
_ENTRIES_A_PART = 64  # so many entries allow for one tile that is not full


@dataclass(frozen=True, slots=True)
class Tiling:
    """group: query heads of a KV head. queries: queries of a tile."""

    group: int
    queries: int

    def count(self, num_entries: int) -> int:
        """Tiles of a row."""
        return -(-self.group * num_entries // self.queries)

    def room(self, num_tokens: int) -> int:
        """Tiles of a pass of so many tokens. A row's last tile is half full on average: this is enough for rows of 32
        entries. A step of more and shorter rows takes a larger bucket."""
        return self.count(num_tokens) + num_tokens // _ENTRIES_A_PART + 2

    def needed(self, num_entries_R: Int, num_tokens: int) -> int:
        """Tiles of these rows and of their padding up to `num_tokens`."""
        cut = _cut(self, num_entries_R.tobytes())
        return len(cut.row_N) + self.count(num_tokens - cut.num_entries)


class Cut(NamedTuple):
    """Rows as tiles: the entries of all rows, the row of each tile, and its first query."""

    num_entries: int
    row_N: Int
    first_query_N: Int


def write_tiles(
    table_N8: Int, tiling: Tiling, spans_6R: Int, num_tokens: int, first_key_R: Int | None = None
) -> None:  # fmt: skip
    """Write the records of these rows, then of one row of padding up to `num_tokens`. Padding sees its own first key,
    or the first key of all where the pass is cut."""
    cut = _cut(tiling, spans_6R[RowField.NUM_ENTRIES].tobytes())
    padding_N8 = _padding(tiling, cut.num_entries, num_tokens)
    num_tiles = len(cut.row_N)
    num_records = num_tiles + len(padding_N8)
    table_N8[:num_tiles, :_FIRST_QUERY] = spans_6R.T.take(cut.row_N, axis=0)
    table_N8[:num_tiles, _FIRST_QUERY] = cut.first_query_N
    table_N8[num_tiles:num_records] = padding_N8
    table_N8[num_records:] = 0
    if first_key_R is None:
        table_N8[:num_records, _FIRST_KEY] = table_N8[:num_records, RowField.FIRST]
    else:
        table_N8[:num_tiles, _FIRST_KEY] = first_key_R[cut.row_N]


@lru_cache(maxsize=256)  # windows are of the same length for several steps
def _cut(tiling: Tiling, num_entries: bytes) -> Cut:
    num_entries_R = np.frombuffer(num_entries, dtype=np.int64)
    count_R = -(-tiling.group * num_entries_R // tiling.queries)
    begin_R = count_R.cumsum() - count_R
    row_N = np.arange(len(count_R)).repeat(count_R)
    first_query_N = (np.arange(len(row_N)) - begin_R.take(row_N)) * tiling.queries
    return Cut(int(num_entries_R.sum()), row_N, first_query_N)


@lru_cache(maxsize=256)
def _padding(tiling: Tiling, first: int, num_tokens: int) -> Int:
    """Records of the tokens from `first` on, which are one row."""
    padding_N8 = np.zeros((tiling.count(num_tokens - first), RECORD), dtype=np.int64)
    padding_N8[:, :_FIRST_QUERY] = first, num_tokens - first, 1, 0, 0, 0
    padding_N8[:, _FIRST_QUERY] = np.arange(len(padding_N8)) * tiling.queries
    return padding_N8
