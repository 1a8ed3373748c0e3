"""What tensors are read from: a safetensors folder, made-up numbers, or another source with something laid over it
(LoRA in `common.checkpoint.lora`, quantized checkpoints in `quant`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open

from common.checkpoint.folder import has_file, plain, read_json_object, shown
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.rules import checkpoint_shapes
from common.checkpoint.sanity import allocated
from common.errors import NO_SUCH_FILE, ConfigError, first_line, why_no_file
from common.user_files import is_file

logger = logging.getLogger(__name__)
Slices = tuple[slice, ...]
_LONGEST_HEADER = 16 * 2**20  # bytes: shards of the largest models have a hundredth of it


class TensorSource(Protocol):
    """Named tensors that can be read in part."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        """The tensor, or the part that `slices` (one a dimension) cut out; may alias the file. Raises ConfigError."""

    def where(self, name: str) -> str:
        """The file that holds or should hold the tensor, for error messages."""


class SafetensorsFolder:
    """Tensors of `<stem>.safetensors`, or else of the shards that `<stem>.safetensors.index.json` names.

    As in transformers a single file goes before an index, and of an index only the names of the shards count.
    """

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self._folder = Path(folder)
        self._index = self._folder / f"{stem}.safetensors.index.json"
        self._single = self._folder / f"{stem}.safetensors"
        self._open_files: dict[Path, Any] = {}
        self._file_of = self._read_index() if self._is_sharded() else self._read_single()

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice_of(name).get_shape())

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        part = self._slice_of(name)
        try:
            tensor: torch.Tensor = part[slices or (slice(None),) * len(part.get_shape())]
        except (SafetensorError, OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
            # the last three where torch has no such type
            raise ConfigError(
                f"{self.where(name)}: {plain(name)}: cannot be read ({first_line(error)}); download the file again"
            ) from None
        return tensor

    def where(self, name: str) -> str:
        if name in self._file_of:
            return str(self._file_of[name])
        return str(self._index if self._is_sharded() else self._single)

    def _is_sharded(self) -> bool:
        return has_file(self._index) and not has_file(self._single)

    def _slice_of(self, name: str) -> Any:
        assert name in self._file_of, f"{name} is not among names()"
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ConfigError(
                f"{self.where(name)}: {plain(name)}: not in this file ({first_line(error)}); download it again"
            ) from None

    def _read_index(self) -> dict[str, Path]:
        weight_map = read_json_object(self._index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{self._index}: weight_map: missing; download the file again")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(
                    f"{self._index}: {plain(name)}: {shown(file)} is not a file of this folder; download it again"
                )
            if not is_file(self._folder / file):
                why = why_no_file(self._folder / file)
                raise ConfigError(
                    f"{self._folder / plain(file)}: {why}, but {self._index.name} puts {plain(name)} there; download it"
                )
        file_of = self._read_shards(sorted(set(weight_map.values())))
        for name, file in weight_map.items():
            if name not in file_of:
                raise ConfigError(
                    f"{self._folder / file}: {plain(name)}: not in this file, where {self._index.name} puts it, nor in "
                    "another; download both again"
                )
        return file_of

    def _read_shards(self, files: list[str]) -> dict[str, Path]:
        file_of: dict[str, Path] = {}
        for path in (self._folder / file for file in files):
            for name in self._open(path).keys():  # noqa: SIM118
                other = file_of.setdefault(name, path)
                if other != path:
                    raise ConfigError(
                        f"{path}: {plain(name)}: also in {other.name}; remove the shard that is old, and its entries "
                        f"in {self._index.name}"
                    )
        return file_of

    def _read_single(self) -> dict[str, Path]:
        if not has_file(self._single):
            for path in (self._single, self._index):
                if (why := why_no_file(path)) != NO_SUCH_FILE:
                    raise ConfigError(f"{path}: {why}; download it again")
            raise ConfigError(
                f"{self._folder}: neither {self._single.name} nor {self._index.name} found; {self._fix()}"
            )
        if has_file(self._index):
            logger.warning("%s is read, and %s beside it is not", self._single, self._index.name)
        return dict.fromkeys(self._open(self._single).keys(), self._single)

    def _fix(self) -> str:
        others = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if others:
            return f"{plain(others[0])} is not read without an index; download the index"
        if inner := sorted(path.parent.name for path in self._folder.glob(f"*/{self._single.name}*")):
            return f"name one of its folders, such as {plain(inner[0])}"
        return "download the checkpoint in safetensors format (.bin files are not read)"

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            _check_beginning(path)
            try:
                self._open_files[path] = safe_open(str(path), framework="pt")
            except MemoryError:  # of addresses, which a file takes as long as it is
                raise ConfigError(
                    f"{path}: its {path.stat().st_size / 2**30:.1f} GiB are more than this process may map; raise "
                    "`ulimit -v`, or download the file again"
                ) from None
            except (SafetensorError, OSError, ValueError) as error:
                raise ConfigError(
                    f"{path}: truncated or corrupt ({plain(first_line(error))}); download the file again"
                ) from None
        return self._open_files[path]


def _check_beginning(path: Path) -> None:
    """Check the length of the header, which is read whole. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            beginning = file.read(23)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); correct its permissions") from None
    if beginning == b"version https://git-lfs":
        raise ConfigError(f"{path}: a git-lfs pointer, not the weights; run `git lfs pull` in the folder")
    header_size = int.from_bytes(beginning[:8], "little")
    if header_size > _LONGEST_HEADER:
        raise ConfigError(f"{path}: truncated or corrupt (a header of {header_size} bytes); download the file again")


class GivenTensors:
    """Tensors in memory, by the checkpoint's names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        return self._tensors[name].detach()[slices]

    def where(self, name: str) -> str:
        return "the given tensors"


class DummySource:
    """Made-up weights of the right shapes: norms 1, the rest normal with deviation 0.02, the same for every tp size.

    Every tensor is a stretch of one repeated pool of random numbers, so that 7B parameters cost a copy, not 7B draws.
    The pool's length is a prime, so no two rows of a matrix are equal.
    """

    _POOL_SIZE = 4_194_301
    _STD = 0.02

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int, device: torch.device | str = "cpu") -> None:
        self._shapes = checkpoint_shapes(config)
        pool = torch.randn(self._POOL_SIZE, generator=torch.Generator().manual_seed(seed)) * self._STD
        self._pool = pool.to(device, dtype)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def where(self, name: str) -> str:
        return "load_format dummy"

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1 and name.endswith(".weight"):  # of a norm
            with allocated(name):
                return torch.ones(shape, dtype=self._pool.dtype, device=self._pool.device)[slices]
        rows, *columns = slices or (slice(0, shape[0]),)
        first_row, last_row, _ = rows.indices(shape[0])
        row_size = shape[1] if len(shape) == 2 else 1
        with allocated(name):
            stretch = self._stretch(crc32(name.encode()) + first_row * row_size, (last_row - first_row) * row_size)
        whole_rows = stretch.view(last_row - first_row, *shape[1:])
        return whole_rows[:, columns[0]] if columns else whole_rows

    def _stretch(self, start: int, count: int) -> torch.Tensor:
        stretch = torch.empty(count, dtype=self._pool.dtype, device=self._pool.device)
        filled, start = 0, start % self._POOL_SIZE
        while filled < count:
            step = min(count - filled, self._POOL_SIZE - start)
            stretch[filled : filled + step] = self._pool[start : start + step]
            filled, start = filled + step, 0
        return stretch
