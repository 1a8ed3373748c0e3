"""JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object. Raises ConfigError naming the file and the fix."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the folder is incomplete, download it again")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); download the file again") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(tree).__name__}; download the file again")
    return tree
