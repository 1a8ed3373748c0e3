"""What a tile of the linears is, and the table of tiles that this process's kernels choose from.

Empty until `install_tiles`: then every linear runs on the library. There is one table, as a process has one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

from lopa_cuda.tiles.wide import WideConfig

Kind = Literal["bf16", "int8", "fp8"]
Fusion = Literal["none", "swiglu"]  # what the linear's kernel computes after the product
MOST_TILE_TOKENS = 128  # in one of Triton's tiles; more tokens take several, each of which reads the weight


class LinearShape(NamedTuple):
    """What tiles are looked up by."""

    kind: Kind
    num_out: int
    num_in: int
    fusion: Fusion

    def __str__(self) -> str:
        fused = "" if self.fusion == "none" else f" {self.fusion}"
        return f"{self.kind} {self.num_out}x{self.num_in}{fused}"


class LinearConfig(NamedTuple):
    """A tile of Triton's kernel."""

    block_c: int  # weight rows of a tile (SwiGLU: of gate and of up each)
    block_k: int
    splits: int
    stages: int
    warps: int = 4
    swap: bool = False  # weight rows on the matrix unit's first dimension, for few tokens
    tail: int = 0  # further rows of the tile, so that tiles divide evenly over the multiprocessors
    prefetch: int = 512  # bytes of each weight row pulled into L2 before the predecessor ends
    early: bool = False  # release the successor before the product instead of after it

    def tile_tokens(self, num_tokens: int) -> int:
        """Tokens of one tile. Few weight rows, or a tail, cannot take the matrix unit's first dimension: the tokens
        then fill it up to 64."""
        least = 64 if self.tail or self.block_c < 64 else 16
        return max(least, min(MOST_TILE_TOKENS, 1 << (num_tokens - 1).bit_length()))


Tile = LinearConfig | WideConfig
# Most tokens and configuration, ascending; None: there the library was measured to be as fast.
Tiles = tuple[tuple[int, Tile | None], ...]
TileTable = Mapping[LinearShape, Tiles]

_installed: dict[LinearShape, Tiles] = {}


def install_tiles(table: TileTable) -> None:
    """Have the kernels of this process choose from `table` alone, from now on."""
    _installed.clear()
    _installed.update(table)


@contextmanager
def only_tiles(table: TileTable) -> Iterator[None]:
    """Have another table for a while; an empty one leaves every linear to the library."""
    kept = dict(_installed)
    install_tiles(table)
    try:
        yield
    finally:
        _installed.clear()
        _installed.update(kept)


def find_config(kind: Kind, num_out: int, num_in: int, num_tokens: int, fusion: Fusion) -> Tile | None:
    """The kernel's tile for this linear, or None for the library's product."""
    for most_tokens, config in _installed.get(LinearShape(kind, num_out, num_in, fusion), ()):
        if num_tokens <= most_tokens:
            return config
    return None


def without_wide(table: TileTable) -> TileTable:
    """The table without the tiles of `lopa_cuda.wgmma`, for a device that cannot run them: there the library serves."""
    return {
        shape: tuple((most, None if isinstance(tile, WideConfig) else tile) for most, tile in tiles)
        for shape, tiles in table.items()
    }


def merge_tiles(below: Tiles, above: Tiles) -> Tiles:
    """Merge both; `above` wins where both have a tile for the same most tokens."""
    return tuple(sorted({**dict(below), **dict(above)}.items()))
