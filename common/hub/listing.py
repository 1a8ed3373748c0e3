"""What a hub says of a repository, which of its files are wanted, and whether a folder has all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from common.errors import ConfigError

_WEIGHTS = ".safetensors"
_SETTINGS = (".json", ".jinja")
_TOKENIZER = ("merges.txt",)
_DEEPER = ("additional_chat_templates/default.jinja",)
MARKS = ("config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json")  # one of which any has


class Unreachable(ConfigError):
    """The hub does not answer, or may not be asked: what is cached will have to do."""


class HubFile(NamedTuple):
    """num_bytes: its size. digest: what the cache calls its content; None: the cache does not."""

    num_bytes: int
    digest: str | None = None


class Listing(NamedTuple):
    """The files of a repository by their paths. revision: the commit, or where the hub tells none the branch."""

    revision: str
    files: Mapping[str, HubFile]

    def wanted(self, *, with_weights: bool) -> dict[str, HubFile]:
        return {path: file for path, file in self.files.items() if _is_wanted(path, with_weights)}

    @property
    def weight_bytes(self) -> int:
        return sum(file.num_bytes for path, file in self.files.items() if _is_weights(path))


def _is_wanted(path: str, with_weights: bool) -> bool:
    if "/" in path:
        return path in _DEEPER
    if path.endswith(_WEIGHTS):
        return with_weights
    return path.endswith(_SETTINGS) or path in _TOKENIZER


def _is_weights(path: str) -> bool:
    return "/" not in path and path.endswith(_WEIGHTS)


def require_readable(name: object, listing: Listing, *, with_weights: bool) -> None:
    """Raise ConfigError for a repository of which nothing could be loaded, naming what it holds instead."""
    if not any(mark in listing.files for mark in MARKS):
        found = ", ".join(sorted(listing.files)[:5]) or "no files"
        raise ConfigError(f"{name}: a repository without config.json, so not of a model (it has {found})")
    if with_weights and not any(map(_is_weights, listing.files)):
        others = sorted(
            path for path in listing.files if PurePosixPath(path).suffix in (".bin", ".pt", ".pth", ".gguf")
        )
        found = f" (it has {', '.join(others[:3])})" if others else ""
        raise ConfigError(
            f"{name}: holds no .safetensors{found}, and other weights are not read, as some of them can run code: name "
            "a repository or a revision that has them"
        )


def has_all(folder: Path, *, with_weights: bool) -> bool:
    """Whether a folder can be loaded as far as its names tell: a download that was cut off leaves files out."""
    if not any((folder / mark).is_file() for mark in MARKS):
        return False
    return not with_weights or (any(folder.glob(f"*{_WEIGHTS}")) and all(map(_has_shards, folder.glob("*.index.json"))))


def _has_shards(index: Path) -> bool:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return True  # loading it says what is wrong with it
    return all((index.parent / str(shard)).is_file() for shard in shards)


def no_room(name: object, folder: Path, variable: str) -> ConfigError:
    """Say that a disk is full. variable: of the environment, which names another place."""
    return ConfigError(
        f"{name}: no room is left in {folder}: make some, or set {variable} to a folder on another disk; files that "
        "have been fetched whole are kept, start again to go on"
    )
