"""Files of tiles: JSON, one for each device, with an entry for each shape of a linear, checked when it is read.

    {"device": "NVIDIA H200", "compute_capability": "9.0", "linears": [
      {"kind": "bf16", "output_channels": 3584, "input_channels": 3584, "fusion": "none",
       "torch": "2.11.0+cu130", "triton": "3.6.0", "tiles": [
        {"most_tokens": 32, "config": {"block_c": 64, "block_k": 128, "splits": 2, "stages": 8}},
        {"most_tokens": 64, "config": null}]}]}

`config` has the fields of LinearConfig, or of WideConfig (with `rows`), without those at their defaults; null: the
library was as fast or faster. torch and triton: the versions that the entry was measured with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from common.config import Frozen, problem
from common.errors import ConfigError
from common.user_files import write_whole
from lopa_cuda.tiles.table import Fusion, Kind, LinearConfig, LinearShape, Tile, Tiles
from lopa_cuda.tiles.wide import (
    BLOCK_BYTES,
    MOST_CLUSTER,
    MOST_CUT_TOKENS,
    MOST_SHARED_BYTES,
    MOST_WIDE_TOKENS,
    WIDE_STEP,
    WideConfig,
    wide_layout,
)

_DEFAULTS = LinearConfig._field_defaults
_FIX = "correct it, or remove the file and run `lopa tune MODEL`"
_Whole = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True, slots=True)
class TileEntry:
    """torch, triton: the versions that the entry was measured with."""

    tiles: Tiles
    torch: str
    triton: str


@dataclass(frozen=True, slots=True)
class TilesFile:
    """compute_capability: such as `9.0`."""

    device: str
    compute_capability: str
    entries: Mapping[LinearShape, TileEntry] = field(default_factory=dict)


class _Config(Frozen):
    block_c: Literal[16, 32, 64, 128, 256]
    block_k: Literal[16, 32, 64, 128, 256, 512]
    splits: int = Field(ge=1, le=64)
    stages: int = Field(ge=1, le=12)
    warps: Literal[1, 2, 4, 8, 16] = _DEFAULTS["warps"]
    swap: bool = _DEFAULTS["swap"]
    tail: Literal[0, 16, 32, 64] = _DEFAULTS["tail"]
    prefetch: int = Field(default=_DEFAULTS["prefetch"], ge=0, le=2**20, multiple_of=16)
    early: bool = _DEFAULTS["early"]


class _WideConfig(Frozen):
    rows: int
    splits: int = Field(default=WideConfig._field_defaults["splits"], ge=1, le=MOST_CLUSTER)
    share: int = Field(default=WideConfig._field_defaults["share"], ge=1, le=MOST_CLUSTER)
    tokens: int = Field(default=WideConfig._field_defaults["tokens"], ge=0, le=MOST_CUT_TOKENS)


def _config_tag(value: Any) -> str:
    is_wide = isinstance(value, _WideConfig) or (isinstance(value, dict) and "rows" in value)
    return WideConfig.__name__ if is_wide else LinearConfig.__name__


class _Rung(Frozen):
    most_tokens: _Whole
    config: (
        Annotated[
            Annotated[_Config, Tag(LinearConfig.__name__)] | Annotated[_WideConfig, Tag(WideConfig.__name__)],
            Discriminator(_config_tag),
        ]
        | None
    )

    @property
    def tile(self) -> Tile | None:
        if isinstance(self.config, _WideConfig):
            return WideConfig(**self.config.model_dump())
        return None if self.config is None else LinearConfig(**self.config.model_dump())


class _Linear(Frozen):
    kind: Kind
    output_channels: _Whole
    input_channels: _Whole
    fusion: Fusion
    torch: str
    triton: str
    tiles: list[_Rung] = Field(min_length=1)

    @model_validator(mode="after")
    def _can_run(self) -> _Linear:
        limits = [rung.most_tokens for rung in self.tiles]
        if limits != sorted(set(limits)):
            raise ValueError(f"most_tokens {', '.join(map(str, limits))} do not ascend: sort the tiles by it")
        fewest = 1
        for most_tokens, config in self.entry.tiles:
            for num_tokens in _served(config, fewest, most_tokens):
                why = config and impossible(self.shape, config, num_tokens)
                if why:
                    raise ValueError(f"the tile of up to {most_tokens} tokens cannot run: {why}")
            fewest = most_tokens + 1
        return self

    @property
    def shape(self) -> LinearShape:
        return LinearShape(self.kind, self.output_channels, self.input_channels, self.fusion)

    @property
    def entry(self) -> TileEntry:
        tiles = tuple((rung.most_tokens, rung.tile) for rung in self.tiles)
        return TileEntry(tiles, self.torch, self.triton)


class _File(Frozen):
    device: str = Field(min_length=1)
    compute_capability: str = Field(pattern=r"^\d+\.\d+$")
    linears: list[Any]


def _served(config: Tile | None, fewest: int, most: int) -> list[int]:
    """Return the numbers of tokens, of those that a tile serves, at which it looks different."""
    if not isinstance(config, WideConfig):
        return [most]
    return [*range(-(-fewest // WIDE_STEP) * WIDE_STEP, min(most, MOST_WIDE_TOKENS), WIDE_STEP), most]


def impossible(shape: LinearShape, config: Tile, num_tokens: int) -> str | None:
    """Why no device can run this tile on this linear; None if one can."""
    gates = 2 if shape.fusion == "swiglu" else 1
    if isinstance(config, WideConfig):
        return _why_not_wide(shape, config, num_tokens)
    if shape.num_in % config.block_k:
        return f"block_k {config.block_k} does not divide {shape.num_in} input channels"
    if config.splits > shape.num_in // config.block_k:
        return f"{config.splits} splits of {shape.num_in // config.block_k} blocks"
    if gates == 2 and (config.splits > 1 or shape.num_out % 2):
        return "swiglu needs the whole sum of an even number of output channels, so splits 1"
    if config.tail and (gates == 1 or config.swap):
        return "a tail is for swiglu without swap"
    used = shared_bytes(shape, config, num_tokens)
    if used > MOST_SHARED_BYTES:
        return f"its stages take {used} bytes of shared memory, {MOST_SHARED_BYTES} are there"
    return None


def _why_not_wide(shape: LinearShape, config: WideConfig, num_tokens: int) -> str | None:
    is_gated, element = shape.fusion == "swiglu", 2 if shape.kind == "bf16" else 1
    if shape.num_out % (16 if is_gated else 8) or shape.num_in * element % 16:
        return f"{shape.num_out} output channels and {shape.num_in} input channels are not whole stores of 16 bytes"
    num_blocks = -(-shape.num_in * element // BLOCK_BYTES)
    if config.splits > num_blocks:
        return f"{config.splits} splits of {num_blocks} blocks"
    try:
        wide_layout(shape.kind, config, num_tokens, shape.num_in, is_gated)
    except ValueError as error:
        return str(error)
    return None


def shared_bytes(shape: LinearShape, config: LinearConfig, num_tokens: int) -> int:
    """Shared memory of one program: its stages' blocks of activations and of weights."""
    gates, element = (2 if shape.fusion == "swiglu" else 1), (2 if shape.kind == "bf16" else 1)
    rows = config.tile_tokens(num_tokens) + gates * (config.block_c + config.tail)
    return rows * config.block_k * element * config.stages


def read_tiles(path: Path) -> TilesFile:
    """Read and check a file. Raises ConfigError naming file, entry and key."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}): {_FIX}") from None
    try:
        file = _File.model_validate(tree, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{path}: {problem(error, _File)}; {_FIX}") from None
    entries: dict[LinearShape, TileEntry] = {}
    for place, given in enumerate(file.linears):
        linear = _checked(path, place, given)
        if linear.shape in entries:
            raise ConfigError(f"{path}: linears.{place}: a second entry for {linear.shape}: keep one of them")
        entries[linear.shape] = linear.entry
    return TilesFile(file.device, file.compute_capability, entries)


def _checked(path: Path, place: int, given: Any) -> _Linear:
    try:
        return _Linear.model_validate(given, strict=True)
    except ValidationError as error:
        keys = ("kind", "output_channels", "input_channels", "fusion")
        known = [str(given[key]) for key in keys if key in given] if isinstance(given, dict) else []
        entry = f"linears.{place}" + (f" ({' '.join(known)})" if known else "")
        raise ConfigError(f"{path}: {problem(error, _Linear, entry)}; {_FIX}") from None


def to_json(file: TilesFile) -> str:
    """The text of a file: one line for each tile, sorted by shape."""
    head = {"device": file.device, "compute_capability": file.compute_capability}
    entries = ",\n".join(_entry_json(shape, file.entries[shape]) for shape in sorted(file.entries))
    return f'{json.dumps(head)[:-1]}, "linears": [\n{entries}\n]}}\n'


def _entry_json(shape: LinearShape, entry: TileEntry) -> str:
    head = {
        "kind": shape.kind, "output_channels": shape.num_out, "input_channels": shape.num_in, "fusion": shape.fusion,
        "torch": entry.torch, "triton": entry.triton,
    }  # fmt: skip
    rungs = [{"most_tokens": most, "config": config and _without_defaults(config)} for most, config in entry.tiles]
    tiles = ",\n".join(f"    {json.dumps(rung)}" for rung in rungs)
    return f'  {json.dumps(head)[:-1]}, "tiles": [\n{tiles}\n  ]}}'


def _without_defaults(config: Tile) -> dict[str, int | bool]:
    usual = config._field_defaults
    return {name: value for name, value in config._asdict().items() if usual.get(name, ...) != value}


def save_tiles(path: Path, file: TilesFile) -> None:
    """Write a file whole or not at all: a reader sees the old file or the new one. Raises OSError."""
    write_whole(path, to_json(file).encode())
