"""Where the input's bytes come from: a file, standard input or a pipe, packed with gzip or not, or of a Parquet file.

The first bytes tell what is no JSON Lines file at all, before a model is loaded for nothing.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

from common.batch.files import STANDARD_INPUT, naming
from common.errors import ConfigError
from common.parquet import MAGIC, read_as_lines

logger = logging.getLogger(__name__)
_FIX = "give a JSONL file with one request a line, after MODEL or as input.path"
_DATA = "data"  # the folder from which the shipped runs of benchmarks read
_BENCHMARK_FIX = "docs/evaluation.md says how to write the benchmarks' files; or name another after MODEL"
_GZIP = b"\x1f\x8b"
# What a file begins with, what it then is, and what unpacks it.
_PACKED = (
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"),
    (b"PK\x03\x04", "zip", "unzip -p"),
    (b"\xfd7zXZ\x00", "xz", "xz -dc"),
    (b"BZh", "bzip2", "bzip2 -dc"),
)


def is_read_once(path: str) -> bool:
    """Whether what was read is gone: standard input, a named pipe, a shell's <(...)."""
    try:
        return path == STANDARD_INPUT or stat.S_ISFIFO(Path(path).stat().st_mode)
    except OSError:
        return False


def shown(path: str) -> str:
    return "standard input" if path == STANDARD_INPUT else path


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """The input's bytes, unpacked. Raises ConfigError for a missing file and for one that holds no JSON lines.

    What can be read only once is read whole, and kept for whoever in this process opens it again.
    """
    with naming(shown(path), _FIX), _open(path) as raw, _unpacked(path, raw) as stream:
        try:
            _require_json_lines(path, stream.peek())
            yield cast(BinaryIO, stream)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(
                f"{shown(path)}: damaged gzip, or one that is still being written ({error}); pack it again"
            ) from None


def _open(path: str) -> io.BufferedReader:
    if is_read_once(path):
        return io.BufferedReader(io.BytesIO(_read_whole(path)))
    file = Path(path)
    if not file.is_file():
        found = "a folder" if file.is_dir() else "a device" if file.exists() else "no such input file"
        raise ConfigError(f"{path}: {found}; {_BENCHMARK_FIX if file.parts[:1] == (_DATA,) else _FIX}")
    return file.open("rb")


@cache
def _read_whole(path: str) -> bytes:
    if path != STANDARD_INPUT:
        return Path(path).read_bytes()
    if sys.stdin is None:
        raise ConfigError("standard input is closed; send requests to it, or name a file in its place")
    if sys.stdin.isatty():
        logger.info("reading requests from the terminal, one JSON object a line; end them with Ctrl-D")
    return sys.stdin.buffer.read()


def _unpacked(path: str, raw: io.BufferedReader) -> io.BufferedReader:
    if raw.peek(2).startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    if raw.peek(len(MAGIC)).startswith(MAGIC):
        return io.BufferedReader(io.BytesIO(read_as_lines(raw, shown(path))))
    if path.endswith(".gz"):
        raise ConfigError(f"{path}: the name says gzip, the content does not; rename it or pack it again")
    return raw


def _require_json_lines(path: str, head: bytes) -> None:
    packing = next(((name, tool) for magic, name, tool in _PACKED if head.startswith(magic)), None)
    encoding = json.detect_encoding(head[:4]).upper()
    first_line, line_end, _ = head.lstrip().partition(b"\n")
    if packing is not None:
        reason = f"packed with {packing[0]}; pipe it in: {packing[1]} FILE | lopa run MODEL -"
    elif head.startswith(_GZIP):
        reason = "packed with gzip twice; unpack it once"
    elif not encoding.startswith("UTF-8"):
        reason = f"text in {encoding.removesuffix('-LE').removesuffix('-BE')}; convert it to UTF-8 with iconv"
    elif not line_end and re.search(rb"\}\s*\r\s*\{", head):
        reason = "its lines end in a carriage return alone; convert it: tr '\\r' '\\n' < FILE"
    elif first_line.startswith(b"[{") or (line_end and first_line.strip() in (b"[", b"[{")):
        reason = "one JSON list; write one request a line: jq -c '.[]' FILE"
    elif line_end and first_line.strip() == b"{":
        reason = "JSON over several lines; write one request a line: jq -c . FILE"
    else:
        return
    raise ConfigError(f"{shown(path)}: no JSON lines but {reason}")
