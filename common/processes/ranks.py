"""What a launcher has told this process about itself, by torchrun's environment variables."""

from __future__ import annotations

import os


def global_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_started() -> int:
    """Processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_started_here() -> int | None:
    """Of them on this node; None without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None
