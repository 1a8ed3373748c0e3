"""Typed access to a config.json whose errors name file, key and fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.folder import shown
from common.checkpoint.json_file import read_json_object
from common.errors import ConfigError

MOST_LAYERS = 1000
MOST_HEADS = 2**16
MOST_TOKENS = 2**24  # token ids travel as float32, which is exact up to here
FIX = "restore the file"
_LARGEST = 2**31  # of any size: beyond it, indices of tensors do not fit


class Fields:
    """names: how the file calls what is asked for under another key."""

    def __init__(self, path: Path, names: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.tree = read_json_object(path)
        self._names = names or {}

    def called(self, names: Mapping[str, str]) -> Fields:
        """The same file under these names."""
        return Fields(self.path, names)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is missing or null."""
        value = self.tree.get(self._names.get(key, key))
        return default if value is None else value

    def integer(self, key: str, *, at_least: int = 1, at_most: int = _LARGEST) -> int:
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self.error(
                key, f"expected an integer of at least {at_least} and at most {at_most}, found {shown(value)}; {FIX}"
            )
        return value

    def number(self, key: str, value: Any = None, *, at_least: float, at_most: float) -> float:
        """`value`, or what the file has under the key."""
        value = self._required(key) if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not at_least <= value <= at_most:
            raise self.error(key, f"expected a number in {at_least:g}..{at_most:g}, found {shown(value)}; {FIX}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {shown(value)}; {FIX}")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """The file may say nothing, null or one of these; other values change the model in a way that is not known."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            known = " or ".join(map(json.dumps, allowed))
            raise self.error(key, f"{shown(value)} is not implemented, only {known}; use another checkpoint")

    def token_id(self, key: str, value: Any, vocab_size: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise self.error(key, f"{shown(value)} is not an id of the {vocab_size} vocabulary entries; {FIX}")
        return value

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {self._names.get(key, key)}: {problem}")

    def _required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.error(key, f"missing; the checkpoint's own {self.path.name} has it, {FIX}")
        return value
