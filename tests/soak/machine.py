"""What the soak does to the machine under a program: a small disk that fills up or freezes, a wall clock that jumps.

Nothing else of the machine is touched: the disk is a file of 48 MiB mounted through a loop device, and the clock is
that of programs which are started with it (`jumping`).
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.config import find_config, load_profile
from tests.engine.serving.served import ROOT

_DISK_MIB = 48
_CHUNK = b"\0" * 4096


class SmallDisk:
    """A file system of its own. Without mounts it is a plain folder, and `why_not` says so."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.path.mkdir()
        self.why_not = self._mount(folder / f"{name}.img")

    def _mount(self, image: Path) -> str | None:
        missing = [tool for tool in ("mkfs.ext4", "mount", "fsfreeze") if shutil.which(tool, path=_PATH) is None]
        if missing:
            return f"needs {', '.join(missing)}"
        with image.open("wb") as file:
            file.truncate(_DISK_MIB * 2**20)
        try:
            # No reserved blocks: root would write on where users are told that the disk is full.
            _quietly("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
            _quietly("mount", "-o", "loop,noatime", str(image), str(self.path))
        except subprocess.CalledProcessError as error:
            return f"needs mounts: {error.stderr.strip().splitlines()[-1]}"
        return None

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leave not a byte of the disk."""
        filler = self.path / "filler"
        try:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(_CHUNK):
                    pass
            yield
        finally:
            filler.unlink(missing_ok=True)

    @contextmanager
    def frozen(self, seconds: float) -> Iterator[None]:
        """Every write waits, as for a disk that does not answer."""
        _quietly("fsfreeze", "-f", str(self.path))
        try:
            yield
            time.sleep(seconds)
        finally:
            _quietly("fsfreeze", "-u", str(self.path))

    def close(self) -> None:
        if self.why_not is None:
            with suppress(subprocess.CalledProcessError):
                _quietly("umount", "-l", str(self.path))


_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _quietly(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": _PATH})


class Clock:
    """The wall clock of the programs that are started with `environment`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.clock"
        self._file.write_bytes(struct.pack("q", 0))

    @property
    def environment(self) -> Mapping[str, str]:
        path = (str(Path(__file__).parent / "jumping"), str(ROOT))
        return {"LOPA_SOAK_CLOCK": str(self._file), "PYTHONPATH": os.pathsep.join(path)}

    def jump(self, seconds: int) -> None:
        """Set the clock so far from the true time."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))


def device_settings(profile: str) -> list[str]:
    """Options by which a text does not depend on what shares its passes, and a server and a run share a GPU."""
    found: Any = load_profile(find_config("profiles", profile))
    if found.device != "cuda":
        return []
    settings = ["gpu_memory_utilization=0.4", *(["batch_invariant=true"] if found.dtype == "bfloat16" else [])]
    return [item for one in settings for item in ("--set", one)]
