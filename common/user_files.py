"""Where this user's files lie that are made once and found again, whether a file is there, how one is written (whole or
not at all), and how one is locked."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def user_folder(variable: str, name: str) -> Path:
    """What the environment variable names, else `lopa/NAME` in `$XDG_CACHE_HOME` or `~/.cache`; there or not."""
    given = os.environ.get(variable)
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG rules: a relative one is none
        cache = Path(os.environ.get("HOME") or "/") / ".cache"
    return cache / "lopa" / name


def is_file(path: Path) -> bool:
    """Whether it is a file; False for a name that no file can have, and where a folder above may not be read."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def write_whole(path: Path, content: bytes) -> None:
    """A reader sees the old file or the new one, with the old one's permissions. A link stays one. Raises OSError."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".lopa-{secrets.token_hex(8)}")
    try:
        with unfinished.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def lock(descriptor: int, kind: int) -> bool | None:
    """Lock a file as `fcntl.flock` does, and return whether it is held now; None: the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
