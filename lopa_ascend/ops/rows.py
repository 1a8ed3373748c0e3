"""Block-causal attention without a mask: queries that see the same keys form one virtual row.

Every query of a block sees exactly the keys before the block's end. To the attention operator that is a short sequence
of its own: its queries, a KV length, and the pages of the request it belongs to. A shift entry (a second query of the
position before a block, which sees what the block sees) joins its block's virtual row; its own key is never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int = npt.NDArray[np.int64]
MOST_ROWS = 4096  # virtual rows of one call of the attention operator


class VirtualRows(NamedTuple):
    """What the attention operator is told. Lengths are host lists, which a captured graph freezes, or, for a graph that
    reads them anew in every run, host tensors.

    block_table: int32 [V, P], pages of each virtual row; rows of one request repeat its pages.
    query_ends: V cumulative query counts; the last is the number of tokens.
    kv_lengths: V counts of visible positions, not cumulative.
    """

    block_table: Tensor
    query_ends: list[int] | Tensor
    kv_lengths: list[int] | Tensor

    def as_inputs(self) -> VirtualRows:
        """The same with int64 host tensors for lengths."""
        ends, lengths = (torch.tensor(counts, dtype=torch.int64) for counts in (self.query_ends, self.kv_lengths))
        return VirtualRows(self.block_table, ends, lengths)

    def parts(self) -> Iterator[tuple[slice, VirtualRows]]:
        """The tokens and virtual rows of each call, where there are more rows than one call takes: prompts in blocks of
        four positions have that many."""
        for first in range(0, len(self.query_ends), MOST_ROWS):
            ends = self.query_ends[first : first + MOST_ROWS]
            start = int(self.query_ends[first - 1]) if first else 0
            rows = VirtualRows(
                self.block_table[first : first + MOST_ROWS],
                [int(end) - start for end in ends],
                self.kv_lengths[first : first + MOST_ROWS],
            )
            yield slice(start, int(ends[-1])), rows


class QueryGroups(NamedTuple):
    """order_T: the entry that each token of the forward computes. row_V: the row that each virtual row is of."""

    order_T: Int
    row_V: Int
    query_ends: list[int]
    kv_lengths: list[int]


def group_queries(row_T: Int, horizon_T: Int) -> QueryGroups:
    """Sort entries so that those of one row and one horizon are adjacent, and say where each run ends.

    Entry t sees the positions below horizon_T[t] of its row. Entries of a run keep their order.
    """
    run_T = row_T * (int(horizon_T.max(initial=0)) + 1) + horizon_T
    order_T = run_T.argsort(kind="stable")  # mostly in order already
    run_T = run_T.take(order_T)
    is_last_T = np.empty(len(run_T), dtype=np.bool_)
    np.not_equal(run_T[1:], run_T[:-1], out=is_last_T[:-1])
    is_last_T[-1:] = True
    last_V = is_last_T.nonzero()[0]
    entry_V = order_T.take(last_V)
    return QueryGroups(order_T, row_T.take(entry_V), (last_V + 1).tolist(), horizon_T.take(entry_V).tolist())
