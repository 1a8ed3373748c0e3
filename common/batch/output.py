"""The output of a batch run: a JSONL file that is valid at every moment, even after kill -9.

A record is one whole line, appended with one write. A half line that a kill left behind is cut off before anything
follows it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from common import user_files
from common.batch.files import naming, real_file, sidecar_path
from common.batch.identity import FIX, check_identity
from common.batch.records import as_record
from common.batch.sidecar import adopt_sidecar, is_foreign, lock_alone, lock_shared, write_identity, writing_alone
from common.errors import ConfigError
from common.parquet import as_parquet
from common.scoring import summarize

logger = logging.getLogger(__name__)
Record = dict[str, Any]
_FSYNC_EVERY_S = 5.0
_SUMMED_AT_ONCE = 1000  # records
# Line ends to str.splitlines, which readers of the file may use; JSON writes them as they are, all others escaped.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


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
            with naming(self.path):
                os.ftruncate(self._descriptor, 0)
                write_identity(self._lock, self._overwrite_as)
            self._overwrite_as = None

    def discard_empty(self) -> None:
        """Remove what this start has made, where it ends before the first record."""
        if not os.fstat(self._descriptor).st_size:
            for path in (self.path, sidecar_path(self.path)):
                path.unlink(missing_ok=True)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, all or nothing: a write that stops short (disk full) is taken back and raises OSError."""
        line = _to_line(record)
        with _naming_in_error(self.path), writing_alone(self._descriptor) as is_alone:
            if is_alone:  # else it may be a line that another process is writing right now
                cut_half_line(self._descriptor)
            num_written = os.write(self._descriptor, line)
            if num_written != len(line):
                self._take_back(line[:num_written])
                raise OSError(errno.ENOSPC, "the record was not written whole")
        if time.monotonic() - self._synced_at > _FSYNC_EVERY_S:
            self.sync()

    def _take_back(self, part: bytes) -> None:
        size = os.fstat(self._descriptor).st_size - len(part)
        if os.pread(self._descriptor, len(part), size) == part:
            os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Write to the disk, for a machine that loses power: a killed process loses nothing anyway."""
        with _naming_in_error(self.path):
            os.fsync(self._descriptor)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            os.close(self._lock)


class Tail:
    """Reads the whole lines that any process has added since the last look, the first of each id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._known: set[str] = set()

    def read_new(self) -> list[Record]:
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        added = [_to_record(line, f"{self._path}: a line") for line in whole.split(b"\n") if line]
        return [record for record in added if _is_first(record, self._known)]


def start_output(path: Path, identity: Mapping[str, Any], *, overwrite: bool, retry_errors: bool) -> OutputFile:
    """Open the run's output, new or resumed. Raises ConfigError if it belongs to another run or one is writing to it.

    identity: what the records depend on; a resume under another identity is refused with what differs.
    """
    with naming(path):
        real_file(path).parent.mkdir(parents=True, exist_ok=True)
        adopt_sidecar(path)
        path = real_file(path)
        has_records = path.exists() and path.stat().st_size > 0
        if has_records and not sidecar_path(path).exists():
            if not _holds_results(path):  # an input, or a file of the model
                raise ConfigError(f"{path} exists and is not the output of a batch run: choose another output.path")
            if not overwrite:
                raise ConfigError(
                    f"{path} exists, and {sidecar_path(path).name}, which says of what run, does not: {FIX}"
                )
        if is_foreign(sidecar_path(path)) and not (has_records and _holds_results(path)):
            raise ConfigError(f"{sidecar_path(path)}: no run has written it: remove it, or choose another output.path")
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
    path = real_file(path)
    with naming(path):
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
    """All records, the first of each id: what a second writer has added is left out, with a warning.

    Raises ConfigError for a line that is none, which no run of ours leaves behind.
    """
    known: set[str] = set()
    num_doubled = 0
    for record in every_record(path):
        if _is_first(record, known):
            yield record
        else:
            num_doubled += 1
    if num_doubled:
        logger.warning(
            "%s: %d records have the id of an earlier one and are not counted: were two runs writing to it?",
            path,
            num_doubled,
        )


def every_record(path: Path) -> Iterator[Record]:
    """Yield the records, those that are there twice too."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            yield _to_record(line, f"{path}: line {number}")


def records_to_resume(path: Path) -> Iterator[Record]:
    """Yield the records, those that are there twice too. Raises ConfigError for one that somebody has edited into
    something that cannot be summed, which would be noticed only once everything is decoded."""
    records, first = every_record(path), 1
    while some := list(islice(records, _SUMMED_AT_ONCE)):
        if not _can_be_summed(some):
            number = next((n for n, record in enumerate(some, first) if not _can_be_summed([record])), first)
            raise _no_record(f"{path}: line {number}")
        yield from some
        first += len(some)


def _can_be_summed(records: list[Record]) -> bool:
    try:
        summarize(records)
        return all(isinstance(r["id"], (str, int)) and isinstance(r.get("error", ""), str) for r in records)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        return False


def _holds_results(path: Path) -> bool:
    """Whether its first line is a result of a run, whose file beside it is lost."""
    try:
        return any(map(_can_be_summed, ([record] for record in islice(every_record(path), 1))))
    except ConfigError:
        return False


def write_table(path: Path, table: Path) -> None:
    """Write the lines of a finished output as a Parquet file too. Raises ConfigError."""
    with path.open("rb") as stream:
        content = as_parquet([json.loads(line) for line in stream])
    with naming(table):
        user_files.write_whole(table, content)


def cut_half_line(descriptor: int) -> int:
    """Truncate after the last newline; return the size that is left."""
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
    text = json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS)
    return text.encode(errors="backslashreplace") + b"\n"  # half a surrogate pair in an id, as JSON escapes it


def _to_record(line: bytes, where: str) -> Record:
    try:
        record: Record = as_record(json.loads(line))
        record["id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _no_record(where) from None
    return record


def _no_record(where: str) -> ConfigError:
    return ConfigError(f"{where} is not a result of a batch run: remove it, {FIX}")


def _is_first(record: Record, known: set[str]) -> bool:
    """Whether the id has not been seen; now it has."""
    key = str(record["id"])
    is_first = key not in known
    known.add(key)
    return is_first


@contextmanager
def _naming_in_error(path: Path) -> Iterator[None]:
    """Put the file into OSErrors, which those of calls on a descriptor do not know."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _repair(path: Path, retry_errors: bool) -> None:
    with path.open("rb+") as stream:
        cut_half_line(stream.fileno())
    if not retry_errors:
        return
    known: set[str] = set()
    with path.open("rb") as stream:
        records = ((line, _to_record(line, f"{path}: a line")) for line in stream)
        kept = [line for line, record in records if "error" not in record and _is_first(record, known)]
    user_files.write_whole(path, b"".join(kept))
