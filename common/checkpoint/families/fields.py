"""Typed access to a config.json whose errors name file, key and fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.folder import read_json_object, shown
from common.errors import ConfigError

MOST_LAYERS = 1000
MOST_HEADS = 2**16
MOST_TOKENS = 2**24  # token ids travel as float32, which is exact up to here
FIX = "restore the file"
_LARGEST = 2**31  # of any size: beyond it, indices of tensors do not fit


class Fields:
    """defaults: what the family's published class has for keys that a file leaves out. names: how the file calls what
    is asked for under another key.
    """

    def __init__(
        self, path: Path, defaults: Mapping[str, Any] | None = None, names: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.tree = read_json_object(path)
        self._defaults = defaults or {}
        self._names = names or {}

    def read_by(self, defaults: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Fields:
        """The same file as the class with these defaults and names reads it."""
        return Fields(self.path, defaults, names)

    def has(self, key: str) -> bool:
        """Whether the file has the key, if only as null."""
        return self._names.get(key, key) in self.tree

    def is_known(self, key: str) -> bool:
        """Whether the published class knows the key."""
        return key in self._defaults

    def get(self, key: str) -> Any:
        """The value, also a null; the class's default where the key is missing, else None."""
        return self.tree[self._names.get(key, key)] if self.has(key) else self._defaults.get(key)

    def integer(self, key: str, *, at_least: int = 1, at_most: int = _LARGEST, null: int | None = None) -> int:
        """Return an integer. null: what a null stands for, if for anything."""
        value = self._required(key, null)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self.error(
                key, f"expected an integer of at least {at_least} and at most {at_most}, found {shown(value)}; {FIX}"
            )
        return value

    def number(self, key: str, value: Any = None, *, at_least: float, at_most: float) -> float:
        """Return `value`, or what the file has under the key."""
        value = self._required(key) if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not at_least <= value <= at_most:
            raise self.error(key, f"expected a number in {at_least:g}..{at_most:g}, found {shown(value)}; {FIX}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a flag; a null is false, as in Python."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {shown(value)}; {FIX}")
        return bool(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse other values than these, the class's default among them. A null passes for a false or empty one."""
        if not self.has(key) and not self.is_known(key):
            return
        value = self.get(key)
        if value not in allowed and (value is not None or allowed[0]):
            known = " or ".join(map(json.dumps, allowed))
            raise self.error(key, f"{shown(value)} is not implemented, only {known}; use another checkpoint")

    def token_id(self, key: str, value: Any, vocab_size: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise self.error(key, f"{shown(value)} is not an id of the {vocab_size} vocabulary entries; {FIX}")
        return value

    def error(self, key: str, problem: str) -> ConfigError:
        if not self.has(key) and self._defaults.get(key) is not None:
            problem = f"missing, which stands for {json.dumps(self._defaults[key])}: {problem}"
        return ConfigError(f"{self.path}: {self._names.get(key, key)}: {problem}")

    def _required(self, key: str, null: int | None = None) -> Any:
        value = self.get(key)
        if value is None and null is None:
            problem = "null" if self.has(key) else "missing"
            raise self.error(key, f"{problem}; the checkpoint's own {self.path.name} has it, {FIX}")
        return null if value is None else value
