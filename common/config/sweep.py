"""Settings to compare: `configs/sweeps/*.yaml`. A file names them one by one (`rows`), spans a `grid`, or both."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from common.config.decode import DecodeConfig
from common.config.explain import explain
from common.config.files import load_yaml
from common.config.frozen import Settings
from common.errors import ConfigError


class SweepRow(Settings):
    """One setting."""

    name: str = Field(min_length=1, description="What the table calls the setting; it also names its output file.")
    decode: dict[str, Any] = Field(
        default_factory=dict, description="Keys of `decode` that differ from the run file's."
    )


class SweepConfig(Settings):
    """Settings to compare, over those of the run file; `configs/sweeps/*.yaml`."""

    rows: tuple[SweepRow, ...] = Field(default=(), description="Settings one by one.")
    grid: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Keys of `decode` with lists of values, of which every combination is a setting.",
    )


def load_sweep(path: Path, base: DecodeConfig) -> dict[str, DecodeConfig]:
    """Name -> settings, in the file's order. Raises ConfigError naming file, row and fix."""
    sweep = load_yaml(path, SweepConfig)
    rows = [*sweep.rows, *_grid_rows(sweep.grid)]
    if not rows:
        raise ConfigError(f"{path}: no settings to compare; add rows or a grid")
    names = [row.name for row in rows]
    nameless = next((name for name in names if not slug(name)), None)
    if nameless is not None:
        raise ConfigError(f"{path}: a row is called {nameless!r}: give it a name with a letter or a digit in it")
    if len({slug(name) for name in names}) < len(names):
        raise ConfigError(f"{path}: two settings have the same name; each one names an output file")
    return {row.name: _settings(path, row, base) for row in rows}


def _grid_rows(grid: Mapping[str, Sequence[Any]]) -> list[SweepRow]:
    if not grid:
        return []
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [
        SweepRow(name=", ".join(f"{key}={value}" for key, value in point.items()), decode=point) for point in points
    ]


def _settings(path: Path, row: SweepRow, base: DecodeConfig) -> DecodeConfig:
    try:
        return DecodeConfig.model_validate({**base.model_dump(), **row.decode})
    except ValidationError as error:
        sentence = explain(error, path, DecodeConfig).removeprefix(f"{path}: ")
        raise ConfigError(f"{path}: row {row.name!r}: decode.{sentence}") from None


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")
