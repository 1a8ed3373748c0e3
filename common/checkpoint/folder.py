"""A checkpoint folder and its files: whether they are there, texts and JSON of a sane size, and names in one line.

Refused are files that are larger, or nested deeper, than any that a model needs.
"""

from __future__ import annotations

import json
import os
import reprlib
from pathlib import Path
from typing import Any

from common.errors import ConfigError, why_no_file
from common.hub import scheme_hint
from common.user_files import is_file

MOST_TEXT_BYTES = 16 * 2**20
MOST_VOCABULARY_BYTES = 64 * 2**20  # the largest published tokenizer.json have half of it
_MOST_VALUES = 4_000_000  # the largest published tokenizer.json hold some 2 million
_DEEPEST = 100
_MOST_DIGITS = 4000  # Python itself refuses some more, late versions of it

_SHIPPED = "models"  # of a checkout
_DOWNLOADS = "checkpoints"  # where the shipped runs look for what the hub has under another name
_LONGEST_NAME = 200
_FOUND = reprlib.Repr()
_FOUND.maxstring = _FOUND.maxother = 80


def existing_folder(folder: str | Path, setting: str = "model") -> Path:
    """The folder as a path. ConfigError where there is none, with the scheme of what may be a name of a hub.

    setting: of the run file, which names the folder.
    """
    path = Path(folder)
    try:
        is_there = path.is_dir()
    except OSError:  # a name too long, a folder that may not be entered
        is_there = False
    if not is_there:
        looked = "" if path.is_absolute() else f" (looked for in {plain(str(Path.cwd()))})"
        raise ConfigError(f"{plain(str(folder))}: no such folder; {_how_to_get(str(folder), setting)}{looked}")
    return path


def has_file(path: Path) -> bool:
    """Whether an optional file is there. Raises ConfigError for what else has its name, such as a link whose file is
    gone: without the file the model may answer otherwise."""
    if is_file(path):
        return True
    if os.path.lexists(path):
        what = "a link that leads to no file" if path.is_symlink() else why_no_file(path)
        raise ConfigError(f"{path}: {what}; download it again, or remove it where the model has none")
    return False


def read_text(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return a text. Raises ConfigError for a file that is larger, unreadable or not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); correct its permissions") from None
    if len(data) > most_bytes:
        raise ConfigError(f"{path}: larger than {most_bytes >> 20} MiB, which no model needs; download the file again")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8, or download it again"
        ) from None


def read_json_object(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> dict[str, Any]:
    """A JSON file that must hold an object. Raises ConfigError naming the file and the fix."""
    if not is_file(path):
        raise ConfigError(f"{path}: {why_no_file(path)}; the folder is incomplete, download it again")
    text = read_text(path, most_bytes)
    # A byte or two make an object of a hundred bytes, so a bound of the file's size is none of its tree's.
    if text.count(",") + text.count("[") + text.count("{") > _MOST_VALUES:
        raise ConfigError(f"{path}: holds more than {_MOST_VALUES} values; download the file again")
    try:
        tree = json.loads(text, parse_int=_integer)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); download the file again") from None
    except RecursionError:
        raise _too_deep(path) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(tree).__name__}; download the file again")
    if _is_deep(tree):
        raise _too_deep(path)
    return tree


def shown(value: object) -> str:
    """Return a value read from a file as part of a sentence: one short line whatever it holds."""
    return _FOUND.repr(value)


def plain(name: str) -> str:
    """Return a name read from a file as part of a sentence: as it is if it is short and printable."""
    return name if name.isprintable() and len(name) <= _LONGEST_NAME else shown(name)


def _how_to_get(name: str, setting: str) -> str:
    """Say how to get a folder."""
    path = Path(name)
    if path.parts[:1] == (_DOWNLOADS,):
        return f"the first lines of the run file say which checkpoint to download to it; or set `{setting}` to another"
    if path.parts[:1] == (_SHIPPED,):
        return f"the demo models come with a checkout: start in its folder, or set `{setting}` to where it has them"
    return scheme_hint(name) or f"download the checkpoint and set `{setting}` to its folder"


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _is_deep(tree: dict[str, Any]) -> bool:
    """Whether the tree is nested too deeply, found level by level: a recursive walk would fail on such a tree."""
    level: list[Any] = [tree]
    for _ in range(_DEEPEST):
        inner = [value for node in level for value in (node.values() if isinstance(node, dict) else node)]
        level = [value for value in inner if isinstance(value, (dict, list))]
    return bool(level)


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(f"{path}: nested deeper than {_DEEPEST} levels; download the file again")
