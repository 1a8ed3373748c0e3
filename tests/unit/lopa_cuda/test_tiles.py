"""The tile table: every query of every row is in one tile, padding too, and tiles that nobody needs are empty."""

from __future__ import annotations

import numpy as np
import pytest

from lopa_cuda.steps import RECORD, Tiling, write_tiles


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("queries", [16, 64])
def test_every_query_is_in_one_tile(seed: int, queries: int) -> None:
    rng = np.random.default_rng(seed)
    tiling = Tiling(int(rng.integers(1, 9)), queries)
    num_rows, num_padding = int(rng.integers(1, 20)), int(rng.choice([0, 1, 300]))
    num_entries, start, slot = (
        rng.integers(1, 200, num_rows),
        rng.integers(0, 900, num_rows),
        rng.integers(0, 4, num_rows),
    )
    spans = np.stack((num_entries.cumsum() - num_entries, num_entries, num_entries, start, start, slot))
    num_tokens = int(num_entries.sum()) + num_padding
    needed = tiling.needed(num_entries, num_tokens)
    table = np.full((needed + 3, RECORD), -1, dtype=np.int32)
    write_tiles(table, tiling, spans, num_tokens)
    assert (table[:needed, 1] > 0).all() and not table[needed:].any()
    records = [*spans.T.tolist(), [num_tokens - num_padding, num_padding, 1, 0, 0, 0]]
    seen = np.zeros((num_tokens, tiling.group), dtype=int)
    for *record, first_query, first_key in table[:needed].tolist():
        assert record in records and first_key == record[0]
        query = np.arange(first_query, min(first_query + queries, tiling.group * record[1]))
        seen[record[0] + query // tiling.group, query % tiling.group] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 60])
def test_rows_of_whole_blocks_fit_the_room_of_their_bucket(num_rows: int, group: int) -> None:
    tiling = Tiling(group, 64)
    for blocks in range(1, 9):
        num_entries = np.full(num_rows, 32 * blocks)
        assert tiling.needed(num_entries, num_rows * 32 * blocks) <= tiling.room(num_rows * 32 * blocks)
