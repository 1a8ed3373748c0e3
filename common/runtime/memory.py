"""Memory that a device may not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import EngineError, is_out_of_memory


@contextmanager
def allocating(what: str, num_bytes: int) -> Iterator[None]:
    """EngineError where so much memory cannot be had, on a CPU too; `what` names the requests and their length."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError) as error:  # of torch, by how much too large it is
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            f"{what} needs {num_bytes / 2**30:.1f} GiB, which cannot be allocated: lower max_num_requests or "
            "max_model_len"
        ) from error
