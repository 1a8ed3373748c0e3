"""Where this user's files lie that are made once and found again, and how one is written: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def user_folder(variable: str, name: str) -> Path:
    """What the environment variable names, else `lopa/NAME` in `$XDG_CACHE_HOME` or `~/.cache`; there or not."""
    given = os.environ.get(variable)
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG rules: a relative one is none
        cache = Path(os.environ.get("HOME") or "/") / ".cache"
    return cache / "lopa" / name


def write_whole(path: Path, content: bytes) -> None:
    """A reader sees the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        unfinished.chmod(0o644)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
