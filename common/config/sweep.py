"""Settings to compare: `configs/sweeps/*.yaml`. A file names points one by one (`rows`), spans a `grid`, zips lists, or
does all of it.

Points that need the same model on the same devices are one launch: the model is loaded once for all of them.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from common.config.decode import DecodeConfig
from common.config.explain import problem
from common.config.files import load_profile_and_run, load_yaml
from common.config.frozen import Settings
from common.config.names import find_config
from common.config.overrides import Override, as_overrides
from common.config.profile import DeviceProfile
from common.config.run import OutputConfig, RunConfig
from common.config.strategies import merged, merged_decode
from common.errors import ConfigError, did_you_mean, placed

OWN = "-"  # in the place of a profile or a run: the one that the sweep names
_MOST_POINTS = 10_000
_MOST_NAME_BYTES = 200  # of a file system's 255, with what is put after them
_OF_A_POINT: Any = {"decode", "input", "output"}  # what points of one launch may differ in


class SweepRow(Settings):
    """One setting."""

    name: str = Field(min_length=1, description="The setting's name in the table and of its output file.")
    profile: str | None = Field(default=None, min_length=1, description="Its profile; `null` is the sweep's.")
    run: str | None = Field(default=None, min_length=1, description="Its run file; `null` is the sweep's.")
    set: dict[str, Any] = Field(
        default_factory=dict, description="Settings of profile and run, as `--set` writes them."
    )
    decode: dict[str, Any] = Field(default_factory=dict, description="Keys of `decode`, over the sweep's.")


class SweepConfig(Settings):
    """Settings to compare, over those of the run file; `configs/sweeps/*.yaml`."""

    profile: str | None = Field(
        default=None,
        min_length=1,
        description="The profile of rows that name none; one on the command line replaces it.",
    )
    run: str | None = Field(
        default=None,
        min_length=1,
        description="The run file of rows that name none; one on the command line replaces it.",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="The folder of the results; `null` is that of `--set output.path` without its ending, else one "
        "named after run and sweep, such as `outputs/demo/lookahead_curve`.",
    )
    set: dict[str, Any] = Field(
        default_factory=dict, description="Settings of profile and run for all rows, as `--set` writes them."
    )
    decode: dict[str, Any] = Field(default_factory=dict, description="Keys of `decode` for all rows, over the run's.")
    rows: tuple[SweepRow, ...] = Field(default=(), description="Settings one by one.")
    grid: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Lists of values for keys of `decode`, such as `skip_threshold` and `strategy.cache`; every "
        "combination is a setting.",
    )
    zip: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Lists of one length for keys of `decode`: the first values make a setting, the second values "
        "another; each is combined with each of the `grid`.",
    )


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A setting, ready to run: `run` has its decode settings and its output."""

    name: str
    profile_path: Path
    run_path: Path
    profile: DeviceProfile
    run: RunConfig


@dataclass(frozen=True, slots=True)
class SweepLaunch:
    """Points that one loaded model decodes one after another."""

    points: tuple[SweepPoint, ...]

    @property
    def profile(self) -> DeviceProfile:
        return self.points[0].profile

    @property
    def run(self) -> RunConfig:
        """The run of the widest point, so that the engine is laid out and warmed up for all of them."""
        return max((point.run for point in self.points), key=_width)


@dataclass(frozen=True, slots=True)
class Sweep:
    """names: of all points of the file, in its order; `launches` hold those that were asked for."""

    path: Path
    folder: Path
    names: tuple[str, ...]
    launches: tuple[SweepLaunch, ...]

    @property
    def points(self) -> list[SweepPoint]:
        return [point for launch in self.launches for point in launch.points]


def load_sweep(
    path: Path,
    profile: str | None = None,
    run: str | None = None,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    usual_profile: str | None = None,
) -> Sweep:
    """Load all points of a file, checked. Raises ConfigError naming file, row and fix.

    profile, run: of all points; None or "-": those that the file names. overrides: as `--set` has them; they go before
    what the file sets, but for decode settings, which are what is compared. only: names of the points to run; all of
    them unless given. usual_profile: of points for which nothing names one.
    """
    sweep = load_yaml(path, SweepConfig)
    rows = _rows(sweep, path)
    _check_names([row.name for row in rows], only, path)
    sweep = sweep.model_copy(update={"profile": sweep.profile or usual_profile})
    loader = _Loader(path, sweep, _named(profile), _named(run), overrides)
    points = [loader.point(row) for row in rows if not only or row.name in only]
    return Sweep(path, loader.folder(points), tuple(row.name for row in rows), tuple(_launches(points)))


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


class _Loader:
    """Profiles and runs of points, each read once."""

    def __init__(
        self, path: Path, sweep: SweepConfig, profile: str | None, run: str | None, overrides: Sequence[str]
    ) -> None:
        self._path, self._sweep, self._profile, self._run = path, sweep, profile, run
        self._overrides = as_overrides(overrides)
        self._loaded: dict[tuple[str, ...], tuple[DeviceProfile, RunConfig]] = {}

    def point(self, row: SweepRow) -> SweepPoint:
        profile_path = self._find("profiles", "profile", self._profile or row.profile or self._sweep.profile, row)
        run_path = self._find("runs", "run", self._run or row.run or self._sweep.run, row)
        if row.set.keys() & {"output", "output.path"}:
            raise ConfigError(
                f"{self._path}: row {row.name!r}: output.path: a row's file is named after it: set folder instead"
            )
        folder = Path(self._sweep.folder or ".")
        if folder == folder.parent != Path():
            raise ConfigError(f"{self._path}: folder {folder}: the root of the file system: name a folder in it")
        own = [] if self._sweep.folder is None else [f"output.path={_as_yaml(f'{folder}.jsonl')}"]
        own += [f"{key}={_as_yaml(value)}" for key, value in {**self._sweep.set, **row.set}.items()]
        overrides = [*(Override(text, "set") for text in own), *self._overrides]
        profile, run = self._load(profile_path, run_path, overrides, row)
        run = run.model_copy(update={"decode": self._decode(row, run.decode)})
        return SweepPoint(row.name, profile_path, run_path, profile, run)

    def folder(self, points: list[SweepPoint]) -> Path:
        """Settle where the results of all points go; the points know their files from here on."""
        given = {*self._sweep.set, *(".".join(override.keys) for override in self._overrides)}
        # A whole section has a path too, or the runs would have been refused.
        is_given = self._sweep.folder is not None or not given.isdisjoint({"output", "output.path"})
        part = "" if is_given else self._path.stem
        folders = {str(_folder_of(point.run, point.run_path) / part): None for point in points}
        if len(folders) > 1:
            raise ConfigError(
                f"{self._path}: its runs write to {' and '.join(folders)}: set folder, one for all results"
            )
        folder = Path(next(iter(folders)))
        for place, point in enumerate(points):
            path = str(folder / f"{slug(point.name)}.jsonl")
            if point.run.output is not None and point.run.output.metrics_path is not None:
                raise ConfigError(
                    f"{self._path}: row {point.name!r}: output.metrics_path: a row's numbers are written beside its "
                    "records: remove it"
                )
            output = OutputConfig(path=path, step_map=point.run.output is not None and point.run.output.step_map)
            run = point.run.model_copy(update={"output": output})
            points[place] = replace(point, run=run)
        return folder

    def _find(self, kind: Any, key: str, name: str | None, row: SweepRow) -> Path:
        if name is None:
            raise ConfigError(
                f"{self._path}: row {row.name!r}: it has no {key}: name one on the command line, or set {key}"
            )
        with placed(f"{self._path}: row {row.name!r}: {key}"):
            return find_config(kind, name)

    def _load(
        self, profile: Path, run: Path, overrides: list[Override], row: SweepRow
    ) -> tuple[DeviceProfile, RunConfig]:
        key = (str(profile), str(run), *(override.text for override in overrides))
        if key not in self._loaded:
            is_of_row = row.set or self._sweep.set
            with placed(f"{self._path}: row {row.name!r}") if is_of_row else nullcontext():
                self._loaded[key] = load_profile_and_run(profile, run, overrides)
        return self._loaded[key]

    def _decode(self, row: SweepRow, base: DecodeConfig) -> DecodeConfig:
        try:
            return base.changed(merged_decode(self._sweep.decode, row.decode))
        except ValidationError as error:
            sentence = problem(error, DecodeConfig, "decode")
            raise ConfigError(f"{self._path}: row {row.name!r}: {sentence}") from None


def _named(name: str | None) -> str | None:
    return None if name == OWN else name


def _rows(sweep: SweepConfig, path: Path) -> list[SweepRow]:
    empty = next((f"{kind}.{key}" for kind in ("grid", "zip") for key, values in getattr(sweep, kind).items()
                  if not values), None)  # fmt: skip
    if empty is not None:
        raise ConfigError(f"{path}: {empty}: its list is empty, so that there is no setting: add a value")
    lengths = {key: len(values) for key, values in sweep.zip.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise ConfigError(f"{path}: zip: lists of one length are taken together, but {found} values: make them as long")
    twice = next((key for key in sweep.grid if key in sweep.zip), None)
    if twice is not None:
        raise ConfigError(f"{path}: {twice} is in grid and in zip: remove it from one of them")
    whole = next((key for key in (*sweep.grid, *sweep.zip) if key.startswith("decode.")), None)
    if whole is not None:
        raise ConfigError(f"{path}: {whole}: in grid and zip all is of decode: write {whole.removeprefix('decode.')}")
    num_points = math.prod(map(len, sweep.grid.values())) * max((*lengths.values(), 1))
    if num_points > _MOST_POINTS:
        raise ConfigError(f"{path}: grid and zip span {num_points} settings, at most {_MOST_POINTS}: take values away")
    rows = [*sweep.rows, *_spanned(sweep)]
    if not rows:
        raise ConfigError(f"{path}: no settings to compare; add rows, a grid or a zip")
    return rows


def _spanned(sweep: SweepConfig) -> Iterator[SweepRow]:
    if not sweep.grid and not sweep.zip:
        return
    grid = [dict(zip(sweep.grid, values, strict=True)) for values in itertools.product(*sweep.grid.values())]
    zipped = [dict(zip(sweep.zip, values, strict=True)) for values in zip(*sweep.zip.values(), strict=True)]
    for one, other in itertools.product(grid, zipped or [{}]):
        point: Mapping[str, Any] = {**one, **other}
        yield SweepRow(name=", ".join(f"{key}={value}" for key, value in point.items()), decode=_nested(point))


def _nested(point: Mapping[str, Any]) -> dict[str, Any]:
    """`strategy.cache` as a key of `strategy`, whichever of the two comes first."""
    decode: dict[str, Any] = {}
    for key, value in sorted(point.items(), key=lambda item: "." in item[0]):
        section, dot, name = key.partition(".")
        decode[section] = merged(decode.get(section), {name: value}) if dot else value
    return decode


def _check_names(names: list[str], only: Sequence[str], path: Path) -> None:
    nameless = next((name for name in names if not slug(name)), None)
    if nameless is not None:
        raise ConfigError(f"{path}: a row is called {nameless!r}: give it a name with a letter or a digit in it")
    long = next((name for name in names if len(slug(name).encode()) > _MOST_NAME_BYTES), None)
    if long is not None:
        raise ConfigError(f"{path}: a row's name of more than {_MOST_NAME_BYTES} bytes, {long[:40]!r}...: shorten it")
    first: dict[str, str] = {}
    for name in names:
        if slug(name) in first:
            files = f"{slug(name)}.jsonl"
            raise ConfigError(
                f"{path}: rows {first[slug(name)]!r} and {name!r} both write to {files}: rename or remove one"
            )
        first[slug(name)] = name
    unknown = next((name for name in only if name not in names), None)
    if unknown is not None:
        known = ", ".join(map(repr, names))
        raise ConfigError(f"{path}: no row is called {unknown!r}: {did_you_mean(unknown, names)}name one of {known}")


def _as_yaml(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)  # of JSON's escapes YAML knows those of half a pair not
    return re.sub(r"[\x7f-\x9f\u2028\u2029\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _folder_of(run: RunConfig, path: Path) -> Path:
    if run.output is None:
        raise ConfigError(f"{path}: the run file has no output section: add output.path, or set folder in the sweep")
    if not Path(run.output.path).name:
        raise ConfigError(f"output.path {run.output.path}: a folder without a name of its own; give a file's name")
    folder = Path(run.output.path).with_suffix("")
    if folder.is_file():
        raise ConfigError(
            f"output.path {run.output.path}: results go to the folder {folder}, which is a file; change it"
        )
    return folder


def _launches(points: list[SweepPoint]) -> Iterator[SweepLaunch]:
    """Points of one model and one profile, in the order in which the first of each stands."""
    groups: dict[tuple[str, ...], list[SweepPoint]] = {}
    for point in points:
        loaded = point.run.model_dump_json(exclude=_OF_A_POINT)
        key = (str(point.profile_path), str(point.run_path), point.profile.model_dump_json(), loaded)
        groups.setdefault(key, []).append(point)
    return (SweepLaunch(tuple(group)) for group in groups.values())


def _width(run: RunConfig) -> tuple[int, int, int]:
    return run.decode.num_lookahead, run.decode.max_new_tokens, run.decode.block_size
