"""What a launcher has told this process about itself, by torchrun's environment variables."""

from __future__ import annotations

import os

from common.errors import ConfigError


def global_rank() -> int:
    return _number("RANK", 0)


def local_rank() -> int:
    return _number("LOCAL_RANK", 0)


def num_started() -> int:
    """Processes that the launcher started; 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def num_started_here() -> int | None:
    """Processes that the launcher started on this node; None without a launcher."""
    return _number("LOCAL_WORLD_SIZE", 0) or None


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, which a launcher sets to a number: unset it") from None
