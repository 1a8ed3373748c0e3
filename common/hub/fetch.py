"""Fetch a repository into a folder: what the hub has, what the cache lacks, whether there is room, the download.

Of several processes on a node that ask for one repository, one downloads while the others wait for it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from common import user_files
from common.errors import ConfigError
from common.hub import hugging_face, modelscope
from common.hub.listing import HubFile, Unreachable, has_all, require_readable
from common.hub.name import HUGGING_FACE, MODELSCOPE, HubName

logger = logging.getLogger(__name__)
_HUBS: Mapping[str, Any] = {HUGGING_FACE: hugging_face, MODELSCOPE: modelscope}
_TOLD_EVERY_S = 30.0
_weight_bytes: dict[Path, int] = {}  # by folder, of repositories that this process has asked a hub about


@cache
def fetch(name: str, *, with_weights: bool = True) -> Path:
    """Return the folder of a cache that holds the repository's files, downloaded where they are not there yet.

    A commit that is there costs no request; a branch or a tag costs one, and what is there is taken where the hub does
    not answer. with_weights: else only files of settings and of the tokenizer. Raises ConfigError.
    """
    parsed = HubName.parse(name)
    hub = _HUBS[parsed.scheme]
    there = hub.cached(parsed)
    if parsed.is_commit and there is not None and has_all(there, with_weights=with_weights):
        return Path(there)
    try:
        listing = hub.look(parsed)
    except Unreachable as unreachable:
        return _from_cache(parsed, there, unreachable, with_weights=with_weights)
    require_readable(name, listing, with_weights=with_weights)
    folder = _downloaded(parsed, hub, listing.wanted(with_weights=with_weights))
    _weight_bytes[folder] = listing.weight_bytes
    return folder


def weight_bytes(folder: str | Path) -> int:
    """Return the bytes of a model's weights: those of a hub's repository whether or not they are fetched yet, else of
    the folder's files; 0 where there are none to see."""
    path = Path(folder)
    try:
        return _weight_bytes.get(path) or sum(file.stat().st_size for file in path.glob("*.safetensors"))
    except (OSError, ValueError):
        return 0


def _from_cache(name: HubName, folder: Path | None, unreachable: Unreachable, *, with_weights: bool) -> Path:
    """Return what an earlier start has fetched. Raises ConfigError."""
    if folder is None:
        raise ConfigError(
            f"{unreachable}, and nothing of it has been fetched before: check the network (proxy? a mirror in "
            "HF_ENDPOINT or MODELSCOPE_ENDPOINT?), or name a folder"
        )
    if not has_all(folder, with_weights=with_weights):
        raise ConfigError(
            f"{unreachable}, and only a part of it has been fetched before, to {folder}: start once with the network"
        )
    _warn(f"{unreachable}: taking what an earlier start has fetched, {folder}")
    return folder


@cache
def _warn(sentence: str) -> None:
    """Say it once: settings and weights are asked for one after the other."""
    logger.warning("%s", sentence)


def _downloaded(name: HubName, hub: Any, files: Mapping[str, HubFile]) -> Path:
    if not hub.missing_bytes(name, files):
        return _whole(name, hub.download(name, files, is_shown=False), files)
    place = hub.cache_folder(name)
    with _alone(name, place):
        missing = hub.missing_bytes(name, files)  # nothing, if another process had the lock
        _require_disk(name, place, missing)
        try:
            with _telling_progress(name, place, missing):
                return _whole(name, hub.download(name, files, is_shown=bool(missing)), files)
        except Unreachable as error:
            raise ConfigError(f"{error}: files that have been fetched whole are kept, start again to go on") from error


def _whole(name: HubName, folder: Path, files: Mapping[str, HubFile]) -> Path:
    """Raise ConfigError where a file is not there or not as long as the hub says."""
    for path, file in files.items():
        if not (folder / path).is_file() or (folder / path).stat().st_size != file.num_bytes:
            raise ConfigError(
                f"{name}: {folder / path} is not whole, though the hub has {file.num_bytes} bytes of it: remove it, "
                "and start again"
            )
    return folder


def _require_disk(name: HubName, place: Path, missing: int) -> None:
    """Raise ConfigError where the disk has no room for what is missing."""
    folder = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ConfigError(
            f"{name}: {_gib(missing)} are to be fetched and {folder} has {_gib(free)} left: make room, or set "
            "HF_HOME or MODELSCOPE_CACHE to a folder on another disk"
        )


@contextmanager
def _alone(name: HubName, place: Path) -> Iterator[None]:
    """Hold the repository's lock on this node, where its file system has locks; else go on without."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = os.open(place / ".lopa.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{name}: {place} cannot be written ({error.strerror}): set HF_HOME, or "
            "MODELSCOPE_CACHE, to a folder that can"
        ) from None
    try:
        if user_files.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) is False:
            logger.info("%s: waiting for another process, which downloads it", name)
            user_files.lock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _telling_progress(name: HubName, place: Path, missing: int) -> Iterator[None]:
    """Say what is fetched, and without a terminal, where no bars are drawn, how far it is."""
    if missing:
        logger.info("%s: fetching %s to %s", name, _gib(missing), place)
    before, ended = _size(place), threading.Event()

    def tell() -> None:
        while not ended.wait(_TOLD_EVERY_S):
            logger.info("%s: %s of %s", name, _gib(_size(place) - before), _gib(missing))

    teller = threading.Thread(target=tell, daemon=True)
    if not sys.stderr.isatty():
        teller.start()
    try:
        yield
    finally:
        ended.set()


def _size(folder: Path) -> int:
    """Bytes of the files below a folder, links left out; they may come and go meanwhile."""
    num_bytes = 0
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):
            num_bytes += 0 if path.is_symlink() else path.stat().st_size
    return num_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
