"""What a repository of a hub is called, and which one a folder of a hub's cache holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError

HUGGING_FACE, MODELSCOPE = "hf", "modelscope"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.-](?![.-]))*"
_NAME = re.compile(rf"(hf|modelscope)://({_PART}/{_PART})(?:@([A-Za-z0-9_](?:[\w/-]|\.(?!\.))*))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_BARE = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_PAGE = re.compile(
    rf"https?://(?:www\.)?(?:(huggingface|hf)\.co|modelscope\.cn/models)/(?!datasets/|spaces/)({_PART}/{_PART})",
    re.ASCII,
)
_OWN = ("checkpoints", "configs", "docs", "models", "results", "scripts", "tests")  # of a checkout, and no owners


class HubName(NamedTuple):
    """A repository, OWNER/NAME, at a branch, tag or commit; None: the hub's usual branch."""

    scheme: str
    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Read `SCHEME://OWNER/NAME[@REVISION]`. Raises ConfigError."""
        match = _NAME.fullmatch(text)
        if match is None:
            scheme = MODELSCOPE if text.startswith(f"{MODELSCOPE}:") else HUGGING_FACE
            raise ConfigError(f"{text}: write {scheme}://OWNER/NAME, or {scheme}://OWNER/NAME@REVISION")
        return cls(*match.groups())

    @property
    def is_commit(self) -> bool:
        """Whether it never means other files."""
        return self.revision is not None and bool(_COMMIT.fullmatch(self.revision))

    @property
    def without_revision(self) -> str:
        return f"{self.scheme}://{self.repository}"

    def __str__(self) -> str:
        return self.without_revision if self.revision is None else f"{self.without_revision}@{self.revision}"


def is_hub_name(text: str) -> bool:
    """Whether a hub is meant, by a name that is well written or not."""
    return text.startswith((f"{HUGGING_FACE}:", f"{MODELSCOPE}:"))


def scheme_hint(text: str) -> str | None:
    """Return how a hub is asked for what looks like an address or one of its names; None for what may be a path, since
    somebody else could own it there."""
    if "://" in text:
        page = _PAGE.match(text)
        scheme = HUGGING_FACE if page is None or page[1] else MODELSCOPE
        return f"write {scheme}://{'OWNER/NAME' if page is None else page[2]}, or download it and name its folder"
    path = Path(text)
    if not _BARE.fullmatch(text) or path.parent.exists() or path.parts[0] in _OWN:
        return None
    return f"for a repository of a hub write {HUGGING_FACE}://{text}, or {MODELSCOPE}://{text}"


def name_of(folder: str | Path) -> HubName | None:
    """Return the repository and the commit whose files this folder of a hub's cache holds; None for other folders.

    Both hubs' tools write `.../OWNER--NAME/snapshots/REVISION`, Hugging Face's with `models--` in front of the owner.
    """
    try:
        parts = Path(folder).resolve().parts
    except (OSError, RuntimeError, ValueError):  # what no folder can be called
        return None
    *above, repository, snapshots, revision = ("", "", "", *parts)
    if snapshots != "snapshots":
        return None
    if repository.startswith("models--"):
        scheme, repository = HUGGING_FACE, repository.removeprefix("models--")
    elif above[-1] == "models":
        scheme = MODELSCOPE
    else:
        return None
    match = _NAME.fullmatch(f"{scheme}://{repository.replace('--', '/')}@{revision}")
    return None if match is None else HubName(*match.groups())


def known_as(folder: str) -> str:
    """Return what a folder is called in files that others read: of a repository the name and the commit."""
    return str(name_of(folder) or folder)
