"""What all ranks of a group must decide alike: a rank that fell back alone would wait for peers that never come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from common.errors import first_line

T = TypeVar("T")


def built_by_all(group: dist.ProcessGroup, build: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `build` makes, if it works on every rank of the group, else None and why not. Collective.

    The ranks agree twice, since `build` is collective itself: that every rank can begin, and that all have ended well.
    """
    try:
        import torch.distributed._symmetric_memory  # noqa: F401  what `build` needs

        reason = ""
    except (RuntimeError, ImportError) as error:
        reason = first_line(error)
    if not _everybody(group, not reason):
        return None, reason or "another rank cannot"
    built: T | None = None
    try:
        built = build()
    except (RuntimeError, ImportError) as error:
        reason = first_line(error)
    return (built, "") if _everybody(group, built is not None) else (None, reason or "another rank could not")


def _everybody(group: dist.ProcessGroup, is_so: bool) -> bool:
    found = torch.tensor([is_so], dtype=torch.int32)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return bool(found.item())
