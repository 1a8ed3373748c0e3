"""Tiles of the linears: which shapes run on the project's kernels and how, as data that needs no kernel.

    configs/tiles/*.json, the user's file -> load_tiles -> install_tiles, once a process -> find_config, every linear

Files are read where the engine is built. What has no entry runs on the library. `lopa_cuda.tuning` measures entries.
"""

from lopa_cuda.tiles.files import TileEntry, TilesFile, impossible, read_tiles, save_tiles, shared_bytes, to_json
from lopa_cuda.tiles.linears import ModelLinear, model_linears
from lopa_cuda.tiles.lookup import Device, is_file, load_tiles, own_folder, tell, this_device
from lopa_cuda.tiles.table import (
    MOST_TILE_TOKENS,
    Kind,
    LinearConfig,
    LinearShape,
    Tile,
    Tiles,
    TileTable,
    find_config,
    install_tiles,
    merge_tiles,
    only_tiles,
    without_wide,
)
from lopa_cuda.tiles.wide import (
    FETCHING_REGISTERS,
    MOST_SHARED_BYTES,
    MOST_WIDE_TOKENS,
    WIDE_STEP,
    WideConfig,
    WideLayout,
    stays_in_unit,
    wide_layout,
)

__all__ = [
    "FETCHING_REGISTERS",
    "MOST_SHARED_BYTES",
    "MOST_TILE_TOKENS",
    "MOST_WIDE_TOKENS",
    "WIDE_STEP",
    "Device",
    "Kind",
    "LinearConfig",
    "LinearShape",
    "ModelLinear",
    "Tile",
    "TileEntry",
    "TileTable",
    "Tiles",
    "TilesFile",
    "WideConfig",
    "WideLayout",
    "find_config",
    "impossible",
    "install_tiles",
    "is_file",
    "load_tiles",
    "merge_tiles",
    "model_linears",
    "only_tiles",
    "own_folder",
    "read_tiles",
    "save_tiles",
    "shared_bytes",
    "stays_in_unit",
    "tell",
    "this_device",
    "to_json",
    "wide_layout",
    "without_wide",
]
