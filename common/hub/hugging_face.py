"""The Hugging Face hub, or a mirror of it, through its own package, whose variables and cache it shares."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from glob import escape
from pathlib import Path

from common.errors import ConfigError, first_line
from common.hub.listing import MARKS, HubFile, Listing, Unreachable, no_room
from common.hub.name import HubName


def cache_folder(name: HubName) -> Path:
    """The folder of the cache that holds all revisions of the repository, there or not."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{name.repository.replace('/', '--')}"


def cached(name: HubName) -> Path | None:
    """The folder of this revision, as whole as it is, without asking the hub."""
    from huggingface_hub import try_to_load_from_cache

    for mark in MARKS:
        path = try_to_load_from_cache(name.repository, mark, revision=name.revision)
        if isinstance(path, str):
            return Path(path).parent
    return None


def look(name: HubName) -> Listing:
    """Ask the hub what the repository holds. Raises Unreachable, or ConfigError for what it refuses."""
    from huggingface_hub import HfApi

    with _telling(name):
        info = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
    files = {
        one.rfilename: HubFile(one.size or 0, one.lfs.sha256 if one.lfs is not None else one.blob_id)
        for one in info.siblings or ()
    }
    return Listing(str(info.sha), files)


def missing_bytes(name: HubName, files: Mapping[str, HubFile]) -> int:
    """Bytes that the cache will grow by: what lies there whole, under any revision, is not fetched again."""
    blobs = cache_folder(name) / "blobs"
    return sum(file.num_bytes for file in files.values() if not (blobs / str(file.digest)).exists())


def download(name: HubName, paths: Iterable[str], *, is_shown: bool) -> Path:
    """Fetch these files, those that are not there yet, and return the folder that has them. Raises Unreachable or
    ConfigError.

    is_shown: with bars, on a terminal.
    """
    from huggingface_hub import snapshot_download

    with _telling(name), nullcontext() if is_shown and sys.stderr.isatty() else _without_bars():
        return Path(
            snapshot_download(name.repository, revision=name.revision, allow_patterns=[escape(path) for path in paths])
        )


@contextmanager
def _without_bars() -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars  # type: ignore[attr-defined]

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:  # the user's word is last
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _telling(name: HubName) -> Iterator[None]:
    """Make one sentence of what the hub, its package or the disk says. Raises Unreachable or ConfigError."""
    from huggingface_hub import constants, errors

    at = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name}: gated: ask for access at {at}/{name.repository}, then set HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name}: {at} has no such repository, or it is private: correct the name, or set HF_TOKEN to a token that "
            "may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{name}: the repository has no revision {name.revision}: name a branch, a tag or a commit of it"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise Unreachable(f"{name}: HF_HUB_OFFLINE keeps it from being asked for") from error
    # The package has had three HTTP clients, and a Rust library beside them: their errors have no base in common.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(name, cache_folder(name), "HF_HOME") from error
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise ConfigError(
                f"{name}: {at} refuses it ({status}): set HF_TOKEN to a token that may read it"
            ) from error
        raise Unreachable(f"{name}: {at} does not answer ({type(error).__name__}: {first_line(error)})") from error
