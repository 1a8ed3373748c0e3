"""JSON files of a checkpoint folder, refused where they are larger or nested deeper than any that a model needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.checkpoint.folder import MOST_TEXT_BYTES, is_file, read_text
from common.errors import ConfigError, why_no_file

_MOST_VALUES = 4_000_000  # the largest published tokenizer.json hold some 2 million
_DEEPEST = 100
_MOST_DIGITS = 4000  # Python itself refuses some more, late versions of it


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


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _is_deep(tree: dict[str, Any]) -> bool:
    """Level by level: a walk that recursed would fail on what it looks for."""
    level: list[Any] = [tree]
    for _ in range(_DEEPEST):
        inner = [value for node in level for value in (node.values() if isinstance(node, dict) else node)]
        level = [value for value in inner if isinstance(value, (dict, list))]
    return bool(level)


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(f"{path}: nested deeper than {_DEEPEST} levels; download the file again")
