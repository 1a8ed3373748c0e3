"""The small `.run.json` beside an output: which run its records belong to, and the lock on them.

Whoever starts a run holds it alone, all processes that write share it, and a second start waits for them to be gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import DecodeConfig
from common.errors import ConfigError

logger = logging.getLogger(__name__)
LOCK_WAIT_S = 15.0  # workers of a killed run need a moment to notice
FIX = "choose another output.path, or pass --overwrite to start anew"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def sidecar_path(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


def recorded_identity(path: Path) -> dict[str, Any] | None:
    """What the sidecar says the records depend on; None if there is none, or only the beginning of one."""
    try:
        identity = json.loads(sidecar_path(path).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return identity if isinstance(identity, dict) else None


def decode_identity(decode: DecodeConfig) -> dict[str, Any]:
    return {f"decode.{key}": value for key, value in decode.model_dump(mode="json").items()}


def lock_alone(path: Path) -> int:
    lock = os.open(sidecar_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + LOCK_WAIT_S
    while not _try_lock(lock, fcntl.LOCK_EX, path):
        if time.monotonic() > deadline:
            os.close(lock)
            raise ConfigError(f"{path}: another run is writing to it; wait for it to end or choose another output.path")
        time.sleep(0.2)
    return lock


def lock_shared(lock: int, path: Path) -> None:
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


def write_identity(lock: int, identity: Mapping[str, Any]) -> None:
    # In place, since the lock is on this very file; a kill in between is harmless, there are no records yet.
    data = json.dumps(identity, indent=2, ensure_ascii=False).encode() + b"\n"
    os.ftruncate(lock, 0)
    os.pwrite(lock, data, 0)
    os.fsync(lock)


def check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    recorded = recorded_identity(path)
    if recorded is None:
        raise ConfigError(f"{path} exists but {sidecar_path(path).name} does not say which run wrote it: {FIX}")
    before = {**decode_identity(DecodeConfig()), **recorded}  # a setting newer than the output had its default
    wanted = json.loads(json.dumps(identity))
    changed = [
        f"{key} was {before.get(key)!r}, is {wanted.get(key)!r}"
        for key in sorted({*before, *wanted})
        if before.get(key) != wanted.get(key)
    ]
    if changed:
        raise ConfigError(f"{path} holds results of another run ({'; '.join(changed)}): {FIX}")
