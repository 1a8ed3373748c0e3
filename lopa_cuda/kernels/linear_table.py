"""Which skinny linears run on the Triton kernel, and with which tile: measured, not guessed.

Conditions: see docs/performance.md. Shapes outside the table go to the library.
"""

from __future__ import annotations

from typing import NamedTuple


class LinearConfig(NamedTuple):
    block_c: int  # weight rows of a tile (gated: of gate and of up each)
    block_k: int
    splits: int
    stages: int
    warps: int = 4
    swap: bool = False  # weight rows on the matrix unit's first dimension, for few tokens
    tail: int = 0  # further rows of the tile, so that tiles divide evenly over the multiprocessors
    prefetch: int = 512  # bytes of each weight row pulled into L2 before the predecessor ends


# (kind, output channels, input channels, gated) -> (most tokens, configuration), ascending
TABLE: dict[tuple[str, int, int, bool], tuple[tuple[int, LinearConfig], ...]] = {}


def find_config(kind: str, num_out: int, num_in: int, num_tokens: int, *, is_gated: bool) -> LinearConfig | None:
    """The kernel's configuration for this linear, or None where the library is faster."""
    for most_tokens, config in TABLE.get((kind, num_out, num_in, is_gated), ()):
        if num_tokens <= most_tokens:
            return config
    return None
