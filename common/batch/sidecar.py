"""The small `.run.json` beside an output: which run its records belong to, and the lock on them.

Whoever starts a run holds it alone, all processes that write share it, and a second start waits for them to be gone.
Where the file system has no locks all this is left out, with a warning.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common import user_files
from common.batch.files import naming, sidecar_path
from common.errors import ConfigError

logger = logging.getLogger(__name__)
_BEGIN = b'{\n  "model": '  # of every sidecar
LOCK_WAIT_S = 15.0  # workers of a killed run need a moment to notice


def recorded_identity(path: Path) -> dict[str, Any] | None:
    """Return what the sidecar says the records depend on; None if there is none, or only the beginning of one."""
    for sidecar in (sidecar_path(path), _beside_link(path)):
        try:
            identity = json.loads(sidecar.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ValueError, RecursionError):
            return None
        return identity if isinstance(identity, dict) else None
    return None


def is_foreign(sidecar: Path) -> bool:
    """Whether a file stands there that no run has written, whole or in part."""
    with suppress(FileNotFoundError), sidecar.open("rb") as file:
        begin = file.read(len(_BEGIN))
        return not _BEGIN.startswith(begin)
    return False


def adopt_sidecar(path: Path) -> None:
    """Move the sidecar from beside the link, where earlier versions put it, to beside the file."""
    if _beside_link(path).exists() and not sidecar_path(path).exists() and not is_foreign(_beside_link(path)):
        shutil.move(_beside_link(path), sidecar_path(path))


def lock_alone(path: Path) -> int:
    with naming(path):
        lock = os.open(sidecar_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + LOCK_WAIT_S
    while (is_held := user_files.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)) is False:
        if time.monotonic() > deadline:
            os.close(lock)
            raise ConfigError(f"{path}: another run is writing to it; wait for it to end or choose another output.path")
        time.sleep(0.2)
    if is_held is None:
        logger.warning("%s: its file system has no locks; do not start this run twice at a time", path)
    return lock


def lock_shared(lock: int, path: Path) -> None:
    if user_files.lock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB) is False:
        raise ConfigError(f"{path}: another run has just started with this output; choose another output.path")


@contextmanager
def writing_alone(descriptor: int) -> Iterator[bool]:
    """Keep other processes of the run out within the block. Yields False where that cannot be had: the file system
    has no locks."""
    is_held = user_files.lock(descriptor, fcntl.LOCK_EX)
    try:
        yield bool(is_held)
    finally:
        if is_held:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def write_identity(lock: int, identity: Mapping[str, Any]) -> None:
    # In place, since the lock is on this very file; a kill in between is harmless, there are no records yet.
    data = json.dumps(identity, indent=2).encode() + b"\n"
    os.ftruncate(lock, 0)
    if os.pwrite(lock, data, 0) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(lock)


def _beside_link(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")
