"""Writes a folder whole or not at all: under a temporary name beside its own, renamed at the end.

A lock is held while it is written. A killed run leaves its folder without a lock: the next run removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

logger = logging.getLogger(__name__)

# A file inside, not the folder itself: NFS locks only what can be opened for writing.
_LOCK = ".lock"


@contextmanager
def whole_or_nothing(out: Path) -> Iterator[Path]:
    """Make an empty folder that becomes `out` when the block ends and is removed when it raises. Raises OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(out)
    partial, lock = _locked_folder(out)
    try:
        yield partial
        partial.replace(out)
        # Only now: a folder under its partial name and without its lock is one that was left behind.
        (out / _LOCK).unlink()
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _locked_folder(out: Path) -> tuple[Path, int]:
    for number in count():
        partial = out.with_name(f".{out.name}.partial-{os.getpid()}" + (f"-{number}" if number else ""))
        try:
            partial.mkdir()
        except FileExistsError:  # another machine's
            continue
        with suppress(FileNotFoundError):  # removed before it was locked
            lock = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT)
            _try_lock(lock, fcntl.LOCK_EX)
            if _is_same(lock, partial / _LOCK):
                return partial, lock
            os.close(lock)
    raise AssertionError("numbers do not end")


def _remove_left_behind(out: Path) -> None:
    name = re.compile(re.escape(f".{out.name}.partial-") + r"[0-9]+(-[0-9]+)?")
    for path in out.parent.iterdir():
        if not name.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT)
            if _try_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_same(lock, path / _LOCK):
                shutil.rmtree(path, ignore_errors=True)
                logger.info("removed %s, which an interrupted run left behind", path)
            os.close(lock)


def _try_lock(lock: int, operation: int) -> bool:
    """Try to take the lock; False where somebody holds it, and where the file system has no locks: nothing is removed
    then."""
    try:
        fcntl.flock(lock, operation)
    except OSError:
        return False
    return True


def _is_same(lock: int, path: Path) -> bool:
    """Whether the file is still the one that was opened."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
