"""Which tiles a device gets: those committed for it, or for others like it, and over them the user's own.

A file is named by its device, `nvidia_h200.json`. Committed files lie in configs/tiles, the user's in a cache folder:
`$LOPA_TILES`, else `lopa/tiles` in `$XDG_CACHE_HOME` or `~/.cache`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from common.config import tiles_folder
from common.user_files import is_file, user_folder
from lopa_cuda.tiles.files import read_tiles
from lopa_cuda.tiles.table import LinearShape, Tiles, TileTable, merge_tiles

FOLDER_VARIABLE = "LOPA_TILES"


class Device(NamedTuple):
    name: str  # as the driver says it: NVIDIA H200
    compute_capability: str  # 9.0

    @property
    def file_name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_") + ".json"


def this_device() -> Device:
    """The CUDA device that this process uses."""
    return Device(torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability())))


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """files: where the table comes from, later ones over earlier ones."""

    table: TileTable
    files: tuple[Path, ...] = ()


def own_folder() -> Path:
    """Where this user's tiles lie, whether or not it exists."""
    return user_folder(FOLDER_VARIABLE, "tiles")


def load_tiles(device: Device, committed: Path | None = None, own: Path | None = None) -> DeviceTiles:
    """The tiles of a device. committed, own: folders other than configs/tiles and the user's.

    Raises ConfigError for a file that is wrong, OSError for one that cannot be read.
    """
    shipped, mine = _committed_for(device, committed or tiles_folder()), (own or own_folder()) / device.file_name
    if not is_file(mine):
        return shipped
    table = dict(shipped.table)
    for shape, entry in read_tiles(mine).entries.items():
        table[shape] = merge_tiles(table.get(shape, ()), entry.tiles)
    return DeviceTiles(table, (*shipped.files, mine))


def _committed_for(device: Device, folder: Path) -> DeviceTiles:
    """Tiles of the device's committed file. Linears and larger numbers of tokens that it lacks come from other devices
    of its compute capability, those first whose names begin most like its name."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (-_num_alike(path.name, device.file_name), path.name))
    table: dict[LinearShape, Tiles] = {}
    files: list[Path] = []
    for path in paths:
        file = read_tiles(path)
        if file.compute_capability != device.compute_capability:
            continue
        lacking = {shape: _beyond(table.get(shape, ()), entry.tiles) for shape, entry in file.entries.items()}
        if any(lacking.values()):
            files.insert(0, path)
        table |= {shape: (*table.get(shape, ()), *tiles) for shape, tiles in lacking.items()}
    return DeviceTiles(table, tuple(files))


def _num_alike(first: str, second: str) -> int:
    """Number of characters with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _beyond(known: Tiles, others: Tiles) -> Tiles:
    """Return the other tiles that are for more tokens than the known ones."""
    most = known[-1][0] if known else 0
    return tuple(rung for rung in others if rung[0] > most)


def tell(device: Device, tiles: DeviceTiles, linears: Iterable[tuple[str, LinearShape]]) -> str:
    """The line of a start: where the tiles come from, and which linears of the model (name, shape) have none."""
    source = " and ".join(map(str, tiles.files)) or "no file"
    without = [f"{name} {shape}" for name, shape in linears if shape not in tiles.table]
    line = f"linear tiles of {device.name}: {source}"
    if not without:
        return line
    return f"{line}; on the library for want of an entry: {', '.join(without)} (`lopa tune MODEL` measures them)"
