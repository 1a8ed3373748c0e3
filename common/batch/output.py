"""The output of a batch run: a JSONL file that is valid at every moment, even after kill -9.

A record is one whole line, appended with one write. A half line that a kill left behind is cut off before anything
follows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.batch.sidecar import FIX, check_identity, lock_alone, lock_shared, sidecar_path, write_identity
from common.errors import ConfigError

Record = dict[str, Any]
_FSYNC_EVERY_S = 5.0


class OutputFile:
    """Append-only records of one run. Made by `start_output` in the process that starts the run, else `join_output`."""

    def __init__(self, path: Path, lock: int, overwrite_as: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._lock = lock
        self._overwrite_as = overwrite_as
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._synced_at = time.monotonic()

    def begin(self) -> None:
        """Drop what an overwritten output held: when nothing can be refused any more, before the first record."""
        if self._overwrite_as is not None:
            os.ftruncate(self._descriptor, 0)
            write_identity(self._lock, self._overwrite_as)
            self._overwrite_as = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, all or nothing: a write that stops short (disk full) is taken back and raises OSError."""
        line = _to_line(record)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            size = cut_half_line(self._descriptor)
            try:
                if os.write(self._descriptor, line) != len(line):
                    raise OSError(errno.ENOSPC, "the record was not written whole", str(self.path))
            except OSError:
                os.ftruncate(self._descriptor, size)
                raise
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        if time.monotonic() - self._synced_at > _FSYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        """A killed process loses nothing that was written; this is for a machine that loses power."""
        os.fsync(self._descriptor)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        self.sync()
        os.close(self._descriptor)
        os.close(self._lock)


class Tail:
    """Reads the whole lines that were added since the last look, by whichever process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Record]:
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.split(b"\n") if line]


def start_output(path: Path, identity: Mapping[str, Any], *, overwrite: bool, retry_errors: bool) -> OutputFile:
    """Open the run's output, new or resumed. Raises ConfigError if it belongs to another run or one is writing to it.

    identity: what the records depend on; a resume under another identity is refused with the keys that differ.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ConfigError(f"{path}: output.path is {kind}; name a file")
    if path.exists() and path.stat().st_size and not sidecar_path(path).exists() and not overwrite:
        raise ConfigError(f"{path} exists and is not the output of a batch run: {FIX}")
    lock = lock_alone(path)
    try:
        if overwrite:
            pass  # the earlier records stay until `begin`
        elif path.exists() and path.stat().st_size:
            check_identity(path, identity)
            _repair(path, retry_errors)
        else:
            write_identity(lock, identity)
        lock_shared(lock, path)
        return OutputFile(path, lock, identity if overwrite else None)
    except BaseException:
        os.close(lock)
        raise


def join_output(path: Path) -> OutputFile:
    """Open the output that another process of this run has started."""
    try:
        lock = os.open(sidecar_path(path), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: another process of this run has started this output but it is not visible here: "
            "put output.path on a file system that all nodes share"
        ) from None
    lock_shared(lock, path)
    return OutputFile(path, lock)


def read_records(path: Path) -> Iterator[Record]:
    """All records. Raises ConfigError for a line that is none, which no run of ours leaves behind."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                record["id"]
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{path}: line {number} is not a result of a batch run: {FIX}") from None
            yield record


def cut_half_line(descriptor: int) -> int:
    """Truncate behind the last newline; the size that is left."""
    end = os.fstat(descriptor).st_size
    if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n":
        return end
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start if newline < 0 else start + newline + 1
        if newline >= 0:
            break
    os.ftruncate(descriptor, end)
    return end


def _to_line(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair in an id
        return json.dumps(record).encode() + b"\n"


def _repair(path: Path, retry_errors: bool) -> None:
    with path.open("rb+") as stream:
        cut_half_line(stream.fileno())
    if not retry_errors:
        return
    kept = [_to_line(record) for record in read_records(path) if "error" not in record]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(kept))
    with contextlib.closing(temporary.open("rb")) as stream:
        os.fsync(stream.fileno())
    temporary.replace(path)
