"""Memory for keys and values, of which a device may have too little."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import EngineError, is_out_of_memory

logger = logging.getLogger(__name__)


def pages_within(room: int, wanted: int) -> int:
    """Return the number of pages that are wanted, or, with a line in the log, as many as there is room for."""
    if room < wanted:
        logger.info("%d KV pages fit, %d would hold every request at its longest: some will wait", room, wanted)
    return min(room, wanted)


@contextmanager
def allocating_kv(num_requests: int, max_model_len: int, num_bytes: int) -> Iterator[None]:
    """Around the allocation: EngineError where so much memory cannot be had, on a CPU too."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError) as error:  # torch's, by how much too large it is
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            f"the KV cache of {num_requests} requests of {max_model_len} positions needs {num_bytes / 2**30:.1f} GiB, "
            "which cannot be allocated: lower max_num_requests or max_model_len"
        ) from error


def return_free_memory(device: torch.device) -> None:
    """Return what this process has freed, and keeps for later, to the machine: others can use it then."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
