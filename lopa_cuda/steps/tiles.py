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

import numpy as np

from common.decoding import NUM_UPLOADED_FIELDS, Int, RowField

RECORD = 8
_FIRST_QUERY, _FIRST_KEY = NUM_UPLOADED_FIELDS, NUM_UPLOADED_FIELDS + 1
_ENTRIES_A_PART = 64  # for one tile more than full ones


@dataclass(frozen=True, slots=True)
class Tiling:
    """group: query heads of a KV head. queries: of a tile."""

    group: int
    queries: int

    def count(self, num_entries: int) -> int:
        """Tiles of a row."""
        return -(-self.group * num_entries // self.queries)

    def count_R(self, num_entries_R: Int) -> Int:
        count_R: Int = -(-self.group * num_entries_R // self.queries)
        return count_R

    def room(self, num_tokens: int) -> int:
        """Tiles of a pass of so many tokens. A row's last tile is half full on average: this is enough for rows of 32
        entries. A step of more and shorter rows takes a larger bucket."""
        return self.count(num_tokens) + num_tokens // _ENTRIES_A_PART + 2

    def needed(self, num_entries_R: Int, num_tokens: int) -> int:
        """Tiles of these rows and of their padding up to `num_tokens`."""
        return int(self.count_R(num_entries_R).sum()) + self.count(num_tokens - int(num_entries_R.sum()))


def write_tiles(
    table_N8: Int, tiling: Tiling, spans_6R: Int, num_tokens: int, first_key_R: Int | None = None
) -> None:  # fmt: skip
    """Records of these rows, then of one row of padding up to `num_tokens`, which sees its own first key, or where rows
    have other keys than their own the first of all."""
    row_N, first_query_N = _cut(tiling, tuple(spans_6R[1].tolist()))
    num_tiles, first = len(row_N), int(spans_6R[0, -1] + spans_6R[1, -1])
    table_N8[:num_tiles, :_FIRST_QUERY] = spans_6R.T.take(row_N, axis=0)
    table_N8[:num_tiles, _FIRST_QUERY] = first_query_N
    num_padding = tiling.count(num_tokens - first)
    if num_padding:
        padding_N8 = table_N8[num_tiles : num_tiles + num_padding]
        padding_N8[:, :_FIRST_QUERY] = first, num_tokens - first, 1, 0, 0, 0
        padding_N8[:, _FIRST_QUERY] = np.arange(num_padding) * tiling.queries
    table_N8[num_tiles + num_padding :] = 0
    if first_key_R is None:
        table_N8[:, _FIRST_KEY] = table_N8[:, RowField.FIRST]
    else:
        table_N8[:num_tiles, _FIRST_KEY] = first_key_R[row_N]
        table_N8[num_tiles:, _FIRST_KEY] = 0


@lru_cache(maxsize=256)  # windows are of the same length for several steps
def _cut(tiling: Tiling, num_entries: tuple[int, ...]) -> tuple[Int, Int]:
    """The row of each tile, and its first query."""
    count_R = tiling.count_R(np.array(num_entries))
    end_R = count_R.cumsum()
    row_N = np.arange(len(count_R)).repeat(count_R)
    return row_N, (np.arange(end_R[-1]) - (end_R - count_R)[row_N]) * tiling.queries
