"""The output of a batch run: a JSONL file that is right at every moment, whoever is killed when.

A record is one whole line, appended with one write. Beside the file a small `.run.json` says which run the records
belong to; it is also the lock: whoever starts a run holds it alone, all processes that write share it, and a second
start waits for them to be gone. A half line that a kill left behind is cut off before anything follows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.config import ConfigError, DecodeConfig

logger = logging.getLogger(__name__)

Record = dict[str, Any]
LOCK_WAIT_S = 15.0  # workers of a killed run need a moment to notice
_FSYNC_EVERY_S = 5.0
_FIX = "choose another output.path, or pass --overwrite to start anew"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def sidecar_path(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


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
            _write_identity(self._lock, self._overwrite_as)
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
        raise ConfigError(f"{path} exists and is not the output of a batch run: {_FIX}")
    lock = _lock_alone(path)
    try:
        if overwrite:
            pass  # the earlier records stay until `begin`
        elif path.exists() and path.stat().st_size:
            _check_identity(path, identity)
            _repair(path, retry_errors)
        else:
            _write_identity(lock, identity)
        _share(lock, path)
        return OutputFile(path, lock, identity if overwrite else None)
    except BaseException:
        os.close(lock)
        raise


def recorded_identity(path: Path) -> dict[str, Any] | None:
    """What the sidecar says the records depend on; None if there is none, or only the beginning of one."""
    try:
        identity = json.loads(sidecar_path(path).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return identity if isinstance(identity, dict) else None


def decode_identity(decode: DecodeConfig) -> dict[str, Any]:
    return {f"decode.{key}": value for key, value in decode.model_dump(mode="json").items()}


def join_output(path: Path) -> OutputFile:
    """Open the output that another process of this run has started."""
    try:
        lock = os.open(sidecar_path(path), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: another process of this run has started this output but it is not visible here: "
            "put output.path on a file system that all nodes share"
        ) from None
    _share(lock, path)
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
                raise ConfigError(f"{path}: line {number} is not a result of a batch run: {_FIX}") from None
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


def _lock_alone(path: Path) -> int:
    lock = os.open(sidecar_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + LOCK_WAIT_S
    while not _try_lock(lock, fcntl.LOCK_EX, path):
        if time.monotonic() > deadline:
            os.close(lock)
            raise ConfigError(f"{path}: another run is writing to it; wait for it to end or choose another output.path")
        time.sleep(0.2)
    return lock


def _share(lock: int, path: Path) -> None:
    if not _try_lock(lock, fcntl.LOCK_SH, path):
        raise ConfigError(f"{path}: another run has just started with this output; choose another output.path")


def _try_lock(lock: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s: its file system has no locks; do not start this run twice at a time", path)
    return True


def _write_identity(lock: int, identity: Mapping[str, Any]) -> None:
    # In place, since the lock is on this very file; a kill in between is harmless, there are no records yet.
    data = json.dumps(identity, indent=2, ensure_ascii=False).encode() + b"\n"
    os.ftruncate(lock, 0)
    os.pwrite(lock, data, 0)
    os.fsync(lock)


def _check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    recorded = recorded_identity(path)
    if recorded is None:
        raise ConfigError(f"{path} exists but {sidecar_path(path).name} does not say which run wrote it: {_FIX}")
    before = {**decode_identity(DecodeConfig()), **recorded}  # a setting newer than the output had its default
    wanted = json.loads(json.dumps(identity))
    changed = [
        f"{key} was {before.get(key)!r}, is {wanted.get(key)!r}"
        for key in sorted({*before, *wanted})
        if before.get(key) != wanted.get(key)
    ]
    if changed:
        raise ConfigError(f"{path} holds results of another run ({'; '.join(changed)}): {_FIX}")


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
