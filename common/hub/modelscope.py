"""ModelScope through its own package (extra `modelscope`), whose variables and cache it shares.

A folder of its cache is of a branch, not of a commit: what was fetched for one start may be replaced for another.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from common.errors import ConfigError, first_line
from common.hub.listing import HubFile, Listing, Unreachable, no_room
from common.hub.name import HubName

_USUAL_BRANCH = "master"


def cache_folder(name: HubName) -> Path:
    """The folder of the cache that holds all revisions of the repository, there or not."""
    return Path(_package().get_default_config().cache_dir) / "models" / name.repository.replace("/", "--")


def cached(name: HubName) -> Path | None:
    """The folder of this revision, as whole as it is, without asking the hub."""
    folder = cache_folder(name) / "snapshots" / (name.revision or _USUAL_BRANCH)
    return folder if folder.is_dir() else None


def look(name: HubName) -> Listing:
    """Ask the hub what the repository holds. Raises Unreachable, or ConfigError for what it refuses."""
    with _telling(name):
        found = _api(name).list_repo_files(name.repository, "model", revision=name.revision)
    return Listing(name.revision or _USUAL_BRANCH, {one.path: HubFile(one.size) for one in found if not one.is_dir})


def missing_bytes(name: HubName, files: Mapping[str, HubFile]) -> int:
    """Bytes that the cache will grow by."""
    folder = cached(name)
    return sum(file.num_bytes - (0 if folder is None else _bytes_there(folder / path)) for path, file in files.items())


def download(name: HubName, paths: Iterable[str], *, is_shown: bool) -> Path:
    """Fetch these files, those that are not there yet, and return the folder that has them. Raises Unreachable or
    ConfigError."""
    with _telling(name):
        folder = _api(name).download_repo(
            name.repository, "model", revision=name.revision, allow_patterns=[escape(path) for path in paths]
        )
        return Path(folder)


def _bytes_there(path: Path) -> int:
    begun = path.with_name(f"{path.name}.incomplete")
    return next((one.stat().st_size for one in (path, begun) if one.is_file()), 0)


def _package() -> Any:
    try:
        import modelscope_hub
    except ImportError:
        raise ConfigError("modelscope://: names of ModelScope need its package: pip install modelscope-hub") from None
    return modelscope_hub


def _api(name: HubName) -> Any:
    """The hub of the two, in China and abroad, that has the repository, unless MODELSCOPE_ENDPOINT names one."""
    api = _package().HubApi()
    return _package().HubApi(endpoint=api.resolve_endpoint_for_read(name.repository))


@contextmanager
def _telling(name: HubName) -> Iterator[None]:
    """Make one sentence of what the hub, its package or the disk says. Raises Unreachable or ConfigError."""
    errors, at = _package(), _package().get_default_config().endpoint
    try:
        yield
    except ConfigError:
        raise
    except errors.NotExistError as error:
        what = "no such repository" if name.revision is None else f"no such repository, or no revision {name.revision}"
        raise ConfigError(
            f"{name}: {at} has {what}, or it is private: correct the name, or set MODELSCOPE_API_TOKEN"
        ) from error
    except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
        raise ConfigError(f"{name}: {at} refuses it: set MODELSCOPE_API_TOKEN to a token that may read it") from error
    except (errors.HubError, OSError) as error:
        causes = [error, *getattr(error, "failed_files", {}).values()]
        if any(getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for cause in causes):
            raise no_room(name, cache_folder(name), "MODELSCOPE_CACHE") from error
        raise Unreachable(f"{name}: {at} does not answer ({type(error).__name__}: {first_line(error)})") from error
