"""The padded shapes at which steps are captured: tokens and virtual rows of a rank, and reads.

A captured step has at least one virtual row of padding and a token for every padded row, since empty rows have not been
tried on a device. Costs are as in graphs.buckets: reading the weights costs the same whatever a step holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphs.buckets import covering_sizes, fit

# Tokens at which int8 arithmetic takes as long as reading the weights on a 910C die (752 TOP/s over 1.6 TB/s, 2
# operations a weight).
KNEE_TOKENS = 235.0
MAX_CAPTURED_TOKENS = 1024
_TOLERANCE = 0.1
_MULTIPLE = 16
_EDGE_MULTIPLE = 8
_ROWS = (4, 8, 16, 32, 64, 128)
_HEAD_TOLERANCE = 0.25


@dataclass(frozen=True)
class Shapes:
    """Ascending sizes of tokens, of virtual rows and of reads. A profile's graph.token_buckets and npu.row_buckets
    replace them.

    most_layers, most_heads: shapes that are captured of each half.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    most_layers: int
    most_heads: int

    @classmethod
    def of(
        cls, token_buckets: Sequence[int], row_buckets: Sequence[int], max_graphs: int, most_aiv_tokens: int = 0
    ) -> Shapes:
        """Shapes of a profile. max_graphs: three or more. most_aiv_tokens: as graphs.hccl has it; the size just below
        it is captured too, so that no step is padded beyond it that could stay within."""
        fixed = tuple(sorted(token_buckets))
        edge = most_aiv_tokens // _EDGE_MULTIPLE * _EDGE_MULTIPLE
        edges = {edge} if 0 < edge < MAX_CAPTURED_TOKENS else set()
        rows = tuple(sorted(row_buckets)) or _ROWS
        most_heads = max_graphs // 3
        tokens, heads = tuple(sorted({*_sizes(_TOLERANCE), *edges})), _sizes(_HEAD_TOLERANCE)
        return cls(fixed or tokens, rows, fixed or heads, max_graphs - most_heads, most_heads)

    @property
    def most_tokens(self) -> int:
        return self.tokens[-1]

    @property
    def most_rows(self) -> int:
        return self.rows[-1]

    @property
    def most_padding(self) -> int:
        """Most tokens of padding that a step can have."""
        gaps = (after - before for before, after in zip((0, *self.tokens), self.tokens, strict=False))
        return max(gaps) + self.most_rows

    def shape(self, num_tokens: int, num_rows: int) -> tuple[int, int] | None:
        """Padded (tokens, virtual rows), or None where the step should run as it is."""
        padded_rows = fit(num_rows + 1, self.rows)
        if padded_rows is None:
            return None
        padded_tokens = fit(num_tokens + padded_rows - num_rows, self.tokens)
        return None if padded_tokens is None else (padded_tokens, padded_rows)

    def reads(self, count: int) -> int | None:
        """Padded number of positions that go through the head, or None."""
        return fit(count, self.heads)


def _sizes(tolerance: float) -> tuple[int, ...]:
    return covering_sizes(
        MAX_CAPTURED_TOKENS, lambda size: 1 + size / KNEE_TOKENS, multiple=_MULTIPLE, tolerance=tolerance
    )
