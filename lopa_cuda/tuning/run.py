"""Runs `lopa tune`: measures tiles for the model of a run, into the user's file of tiles.

The file is written after every linear, so that a search that was stopped goes on where it ended.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from errno import EINVAL
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.checkpoint import ModelConfig, check_tensor_parallel, load_model_config
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError, EngineError, MissingCapability, first_line, is_out_of_memory, why_no_file
from common.platforms import TuneOptions
from common.user_files import is_file
from lopa_cuda.assemble import chooses_tiles
from lopa_cuda.tiles import (
    Device,
    ModelLinear,
    Tile,
    TileEntry,
    TilesFile,
    TileTable,
    load_tiles,
    merge_tiles,
    model_linears,
    own_folder,
    read_tiles,
    save_tiles,
    this_device,
    without_wide,
)
from lopa_cuda.tuning.candidates import candidates, distinct
from lopa_cuda.tuning.search import Choice, choose, title
from lopa_cuda.wgmma import why_unavailable

if TYPE_CHECKING:
    from lopa_cuda.tuning.pair import LayerSizes

_LEAST_CAPABILITY = (9, 0)  # the kernel's operands come through the tensor memory accelerator


@dataclass(frozen=True, slots=True)
class Versions:
    """What an entry is measured with."""

    torch: str
    triton: str


class OwnTiles:
    """The file that a search writes. Raises ConfigError where it is another device's, or cannot be written."""

    def __init__(self, path: Path, device: Device, versions: Versions) -> None:
        self.path = path
        self._empty = TilesFile(device.name, device.compute_capability)
        self._versions = versions
        _check_writable(path)
        if self._read().device != device.name:
            raise ConfigError(
                f"{path} holds tiles of {self._read().device}, this device is {device.name}: name another file with "
                "--output"
            )

    def missing(self, linear: ModelLinear, token_counts: Sequence[int]) -> list[int]:
        """The numbers of tokens for which it has no tile that was measured with these versions."""
        entry = self._entry(linear)
        return [count for count in token_counts if count not in dict(entry.tiles)]

    def add(self, linear: ModelLinear, choices: Sequence[Choice]) -> None:
        """Add a tile; what other processes have added meanwhile stays."""
        file, found = self._read(), tuple((choice.num_tokens, choice.config) for choice in choices)
        entry = self._entry(linear)
        entries = {**file.entries, linear.shape: replace(entry, tiles=merge_tiles(entry.tiles, found))}
        save_tiles(self.path, replace(file, entries=entries))

    def _entry(self, linear: ModelLinear) -> TileEntry:
        """The entry of a shape; empty where there is none, or one that was measured with other versions."""
        empty = TileEntry((), self._versions.torch, self._versions.triton)
        found = self._read().entries.get(linear.shape, empty)
        return found if (found.torch, found.triton) == (empty.torch, empty.triton) else empty

    def _read(self) -> TilesFile:
        return read_tiles(self.path) if self.path.exists() else self._empty


def _check_writable(path: Path) -> None:
    try:
        if path.exists() and not is_file(path):
            raise OSError(EINVAL, f"it is {why_no_file(path)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path}: tiles cannot be written there ({error.strerror}): set LOPA_TILES to another folder, or name a "
            "file with --output"
        ) from None


def tune_model(profile: DeviceProfile, run: RunConfig, options: TuneOptions) -> Iterator[str]:
    """Measure tiles for the run's model as the profile cuts it, on this device; a line for every finding.

    Raises ConfigError, MissingCapability or EngineError.
    """
    config = load_model_config(run.model)
    tp_size = _tensor_parallel_size(profile)
    _require_tiles(profile, config)
    check_tensor_parallel(config, tp_size)
    _require_kernels()
    device = this_device()
    import triton

    path = Path(options.output) if options.output else own_folder() / device.file_name
    versions = Versions(str(torch.__version__), triton.__version__)
    own = OwnTiles(path, device, versions)
    linears = model_linears(profile, run, config, tp_size)
    yield f"{device.name}, torch {versions.torch}, triton {versions.triton}: {len(linears)} linears of {run.model}"
    left = remaining(own, linears, options)
    yield from (f"{title(linear)}: already in {path}" for linear in linears if linear not in left)
    try:
        yield from _measured(own, left, config, tp_size, load_tiles(device).table)
    except RuntimeError as error:
        if isinstance(error, EngineError) or not is_out_of_memory(error):
            raise
        raise EngineError(
            f"one linear with its tokens does not fit the free memory of {device.name} ({first_line(error)}): end what "
            "else runs on it, or give --tokens fewer, and start again; what has been measured is kept"
        ) from error
    yield f"{len(linears)} linears in {path}" + _hint(path, device)


def remaining(own: OwnTiles, linears: Sequence[ModelLinear], options: TuneOptions) -> dict[ModelLinear, list[int]]:
    """The numbers of tokens to measure of each linear, without those that have them all."""
    counts = list(options.token_counts)
    found = {linear: counts if options.is_overwriting else own.missing(linear, counts) for linear in linears}
    return {linear: missing for linear, missing in found.items() if missing}


def tiles_to_time(
    left: dict[ModelLinear, list[int]], multiprocessors: int, in_use: TileTable, *, has_wide: bool = True
) -> dict[tuple[ModelLinear, int], list[Tile]]:
    """Tiles to time, by linear and number of tokens. The tile in use is one of them, so that the outcome is never
    worse. has_wide: whether the device runs `lopa_cuda.wgmma`."""
    found = {}
    for linear, counts in left.items():
        for count in counts:
            current = next((tile for most, tile in in_use.get(linear.shape, ()) if count <= most), None)
            proposed = candidates(linear.shape, count, multiprocessors, has_wide=has_wide)
            tiles = [*([current] if current else []), *proposed]
            found[linear, count] = list(dict.fromkeys(tiles))
    return found


def search_all(
    own: OwnTiles, timed: dict[tuple[ModelLinear, int], list[Tile]],
    search: Callable[[ModelLinear, dict[int, list[Tile]]], Iterator[Choice]],
) -> Iterator[str]:  # fmt: skip
    """Search all linears; yields a line for each choice. The file has a linear's choices before the next linear
    begins."""
    for linear in dict.fromkeys(linear for linear, _ in timed):
        choices = []
        for choice in search(linear, {count: tiles for (whose, count), tiles in timed.items() if whose == linear}):
            choices.append(choice)
            yield f"{title(linear)}, {choice}"
        own.add(linear, choices)


@torch.inference_mode()
def _measured(
    own: OwnTiles, left: dict[ModelLinear, list[int]], config: ModelConfig, tp_size: int, in_use: TileTable
) -> Iterator[str]:
    # Here: they need Triton, and what can be refused has been by now.
    from lopa_cuda.tuning.compiling import compile_all, num_jobs
    from lopa_cuda.tuning.pair import LayerSizes

    why_not_wide = why_unavailable()
    if why_not_wide:
        yield f"no wide tiles on this device: {why_not_wide}"
        in_use = without_wide(in_use)
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    timed = tiles_to_time(left, multiprocessors, in_use, has_wide=not why_not_wide)
    cases = distinct((linear.shape, count, tile) for (linear, count), tiles in timed.items() for tile in tiles)
    if cases:
        yield f"compiling {len(cases)} kernels in {num_jobs()} processes"
        compile_all(cases)
    sizes = LayerSizes.of(config, tp_size)
    yield from search_all(own, timed, lambda linear, tiles_at: _search(linear, sizes, tiles_at))


def _search(linear: ModelLinear, sizes: LayerSizes, tiles_at: dict[int, list[Tile]]) -> Iterator[Choice]:
    from lopa_cuda.tuning.pair import LinearPair

    torch.cuda.empty_cache()  # releases the memory of the linear before
    pair = LinearPair(linear, sizes)
    for count, tiles in tiles_at.items():
        yield choose(tiles, count, partial(pair.try_us, count), partial(pair.is_right, count))


def _tensor_parallel_size(profile: DeviceProfile) -> int:
    if profile.mesh == "auto":
        raise ConfigError(
            f"profile {profile.name}: mesh auto is decided when it starts: say how the model is cut, for example "
            "--set 'mesh={tensor_parallel_size: 2}'"
        )
    return profile.mesh.tensor_parallel_size


def _require_tiles(profile: DeviceProfile, config: ModelConfig) -> None:
    if not chooses_tiles(profile, getattr(torch, profile.dtype), config):
        raise ConfigError(
            f"profile {profile.name} takes no tiles: they are for dtype bfloat16, kernels auto or triton, and not for "
            "batch_invariant"
        )


def _require_kernels() -> None:
    if not torch.cuda.is_available():
        raise MissingCapability("lopa tune measures on a CUDA device, and none is visible: run it where the model will")
    if find_spec("triton") is None:
        raise MissingCapability("lopa tune needs Triton: run `pip install -e '.[cuda]'`")
    if torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        raise MissingCapability(
            f"{torch.cuda.get_device_name()}: tiles need compute capability 9.0 or later; linears stay the library's"
        )


def _hint(path: Path, device: Device) -> str:
    """How engines are told of a file that they would not find."""
    wanted = own_folder() / device.file_name
    if path.resolve() == wanted.resolve():
        return ""
    return f"; engines read {wanted}: move it there, or set LOPA_TILES to the folder of a file {device.file_name}"
