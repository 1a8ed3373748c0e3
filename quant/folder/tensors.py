"""Tensors of a checkpoint folder by name: read a slice at a time, written in shards. Knows safetensors, not schemes."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quant.errors import QuantizationError

INDEX_FILE = "model.safetensors.index.json"
_MOST_JSON_BYTES = 16 * 2**20
_MOST_JSON_VALUES = 2_000_000
_DEEPEST_JSON = 100
_LONGEST_NAME = 300
_FOUND = reprlib.Repr()
_FOUND.maxstring = _FOUND.maxother = 80
_LONGEST_HEADER = 16 * 2**20

Slices = tuple[slice, ...]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises QuantizationError for a missing, unreadable, huge, deeply nested or other file."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_JSON_BYTES + 1)
        is_large = len(data) > _MOST_JSON_BYTES or sum(map(data.count, (b",", b"[", b"{"))) > _MOST_JSON_VALUES
        tree = None if is_large else json.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise QuantizationError(f"{path}: no such file; the folder is not a complete checkpoint") from None
    except OSError as error:
        raise QuantizationError(f"{path}: cannot be read ({error.strerror}); correct its permissions") from None
    except ValueError as error:
        raise QuantizationError(f"{path}: not valid JSON ({error}); copy the file again") from None
    except RecursionError:
        is_large = True
    if is_large or _is_deep(tree):
        raise QuantizationError(f"{path}: larger or nested deeper than any that a model needs; copy the file again")
    if not isinstance(tree, dict):
        raise QuantizationError(f"{path}: expected an object, found {type(tree).__name__}; copy the file again")
    return tree


def _is_deep(tree: Any) -> bool:
    level = [tree]
    for _ in range(_DEEPEST_JSON):
        nodes = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list))]
        level = [value for node in nodes for value in node]
    return any(isinstance(node, (dict, list)) for node in level)


def check_name(path: Path, name: str) -> None:
    """Refuse a tensor's name that no sentence can show. Raises QuantizationError."""
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise QuantizationError(f"{path}: a tensor has no proper name, {shown(name)}; copy the file again")


def shown(value: object) -> str:
    """Show a value out of a file as part of a sentence: one short line whatever it holds."""
    return _FOUND.repr(value)


class TensorFolder:
    """All tensors of a folder's safetensors files. Opens every file once and checks it against the index, if any.

    Serves as a source of the model's weight loader.

    Raises QuantizationError naming the file or tensor for truncated files and for an index that does not fit.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        index = _find_index(self.folder)
        if index is None:
            single = self.folder / "model.safetensors"
            self._read_all([single] if single.is_file() else sorted(self.folder.glob("*.safetensors")))
        else:
            self._read_index(index)

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def where(self, name: str) -> str:
        """The file that holds the tensor; the folder for one that is in none."""
        return str(self._file_of.get(name, self.folder))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, slices: Slices = ()) -> Tensor:
        """The tensor, or the part that `slices` (one a dimension) cut out."""
        file = self._file(name)
        try:
            tensor: Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
            raise QuantizationError(f"{self.where(name)}: {name}: cannot be read ({error}); copy it again") from None
        return tensor.contiguous()

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise QuantizationError(f"{self.folder}: tensor {name!r} is in no file; quantize or copy the folder again")
        return self._files[self._file_of[name]]

    def _read_all(self, paths: list[Path]) -> None:
        if not paths:
            raise QuantizationError(f"{self.folder}: no safetensors files; give a Hugging Face model folder")
        for path in paths:
            for name in self._open(path):
                check_name(path, name)
                if name in self._file_of:
                    other = self._file_of[name].name
                    raise QuantizationError(f"{path}: tensor {name!r} is also in {other}; remove the file that is old")
                self._file_of[name] = path

    def _read_index(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise QuantizationError(f"{index}: no weight_map from tensors to files; copy the file again")
        held = {file: set(self._open(self.folder / file)) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            check_name(index, name)
            if name not in held[file]:
                raise QuantizationError(f"{index}: tensor {name!r} is not in {file}; copy both files again")
            self._file_of[name] = self.folder / file

    def _open(self, path: Path) -> Iterator[str]:
        check_name(self.folder, path.name)
        if path.parent != self.folder:
            raise QuantizationError(f"{path}: shards must lie in the model folder itself; correct the index")
        try:
            if not path.is_file():
                what = "no regular file" if path.exists() else "missing"
                raise QuantizationError(f"{path}: the index names this file, but it is {what}; copy it")
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
            if header_size > _LONGEST_HEADER:
                raise SafetensorError(f"a header of {header_size} bytes")
            self._files[path] = safe_open(path, framework="pt")
        except (SafetensorError, OSError, MemoryError) as error:
            reason = str(error) if str(error).isprintable() and len(str(error)) < _LONGEST_NAME else shown(str(error))
            raise QuantizationError(f"{path}: truncated or not safetensors ({reason}); copy it again") from None
        return iter(self._files[path].keys())


def _find_index(folder: Path) -> Path | None:
    """Find the index file; None also where the single file is there, which comes first, as in transformers."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    found = [path for path in found if not path.with_name(path.name.removesuffix(".index.json")).is_file()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise QuantizationError(f"{folder}: holds {names}; remove the index that is old")
    return found[0] if found else None


class ShardWriter:
    """Writes tensors in the given order, a file whenever `max_bytes` are reached, and the index at `close`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.total_bytes = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._waiting_bytes + size > self._max_bytes:
            self._flush()
        # safetensors refuses tensors that share memory, as the merged linears' one input scale does
        is_shared = any(tensor.data_ptr() == other.data_ptr() for other in self._waiting.values())
        self._waiting[name] = tensor.clone() if is_shared else tensor.contiguous()
        self._waiting_bytes += size
        self.total_bytes += size

    def close(self) -> None:
        self._flush()
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            (self._folder / _unnumbered(number)).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _flush(self) -> None:
        if not self._waiting:
            return
        self._shards.append(list(self._waiting))
        path = self._folder / _unnumbered(len(self._shards))
        path.touch()
        mode = path.stat().st_mode  # as of any new file; safetensors makes its own for nobody else to read
        save_file(self._waiting, path, metadata={"format": "pt"})
        path.chmod(mode)
        self._waiting = {}
        self._waiting_bytes = 0


def _unnumbered(number: int) -> str:
    return f"model-{number:05d}.safetensors.partial"
