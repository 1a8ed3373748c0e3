"""What a checkpoint folder holds, cheaply: a digest a file, made without reading gigabytes of weights.

Of a large safetensors file these are its size, its header (names, shapes, types, places of all tensors) and the first
bytes of every tensor: training changes them all. What a copy of the folder shares with it is all that enters, so times
do not; they are noted beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from common.batch.files import naming

_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/default.jinja",
    "adapter_config.json",
)
_PATTERNS = ("*.safetensors.index.json", "quant_model_description*.json")
_WEIGHTS = "*.safetensors"
_READ_WHOLE = 2**26  # bytes
_SAMPLE = 4096  # bytes of a tensor
_LONGEST_HEADER = 100_000_000  # safetensors' own limit
_FIX = "make it readable, or download it again"
_FIRST_S, _LAST_S = -62135596800, 253402300799  # what a date can be: the years 1 to 9999


def digests(folder: Path, *, with_weights: bool = True) -> dict[str, str] | None:
    """File -> digest, of the files that decoding depends on; None if there is no such folder. Raises ConfigError."""
    if not folder.is_dir():
        return None
    found = {}
    for path in _files(folder, with_weights):
        with naming(path, _FIX):
            found[path.name] = _digest(path)
    return found


def last_change(folder: Path, *, with_weights: bool = True) -> str | None:
    """Return when the youngest of these files was written."""
    if not folder.is_dir():
        return None
    youngest = max((path.stat().st_mtime for path in _files(folder, with_weights)), default=None)
    if youngest is None:
        return None
    known = min(max(youngest, _FIRST_S), _LAST_S)  # a clock that was wrong may have set another
    return datetime.fromtimestamp(known, timezone.utc).isoformat(timespec="seconds")


def _files(folder: Path, with_weights: bool) -> list[Path]:
    patterns = (*_PATTERNS, _WEIGHTS) if with_weights else _PATTERNS
    found = {folder / name for name in _NAMES} | {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        if size <= _READ_WHOLE or path.suffix != ".safetensors":
            digest.update(stream.read())
        else:
            for part in _samples(stream, size):
                digest.update(part)
    return digest.hexdigest()[:32]


def _samples(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The header, and the first bytes of every tensor; of a file that is none, bytes from all over it."""
    header = stream.read(min(int.from_bytes(stream.read(8), "little"), _LONGEST_HEADER))
    yield header
    begin = 8 + len(header)
    for offset in _offsets(header) or range(0, size - begin, (size - begin) // 1024 or 1):
        stream.seek(begin + offset)
        yield stream.read(_SAMPLE)


def _offsets(header: bytes) -> list[int]:
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        return sorted(offset for offset in (int(entry["data_offsets"][0]) for entry in tensors) if offset >= 0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
