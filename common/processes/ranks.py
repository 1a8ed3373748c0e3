"""What a launcher has told this process about itself, by torchrun's environment variables.

Operators of Kubernetes use the same names for a pod, in which this program is started once: RANK is the pod's number
there, WORLD_SIZE counts pods or the devices of all of them, LOCAL_RANK lists those of this one or is missing. Only a
process with a LOCAL_RANK of its own is a rank; the launcher reads the others as nodes (common.processes.nodes).
"""

from __future__ import annotations

import os

from common.errors import ConfigError


def is_launched() -> bool:
    """Whether a launcher started this process as one of several, or as the only one."""
    return os.environ.get("LOCAL_RANK", "").isdecimal()


def global_rank() -> int:
    return _number("RANK", 0)


def shown_rank() -> str | None:
    """The rank for messages, as the launcher gives it and whatever that is; None for the only process."""
    is_alone = not is_launched() or os.environ.get("WORLD_SIZE", "1") == "1"
    return None if is_alone else os.environ.get("RANK", "0")


def local_rank() -> int:
    return _number("LOCAL_RANK", 0)


def num_started() -> int:
    """Processes that the launcher started; 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def num_started_here() -> int | None:
    """Processes that the launcher started on this node; None without a launcher."""
    return _number("LOCAL_WORLD_SIZE", 0) or None


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default)) if is_launched() else str(default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, which a launcher sets to a number: unset it") from None
