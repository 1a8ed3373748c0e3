"""Reads JSON as requests are written in it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def read_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON. Raises ValueError, also for a key that an object has twice, and RecursionError."""
    return json.loads(text, object_pairs_hook=_without_twice)


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        most, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {most[:60]!r} {'twice' if count == 2 else f'{count} times'}")
    return found
