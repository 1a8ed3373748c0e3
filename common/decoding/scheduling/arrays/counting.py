"""0, 1, 2 ...: making them takes as long as adding them, so they are kept."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from common.decoding.plan import Int

ONE = np.array(1)  # which is added to an array in half of the time that an int takes


def counting(count: int) -> Int:
    """0, 1, 2 ..."""
    return _remembered(1 << count.bit_length())[:count]


@lru_cache(maxsize=32)  # sizes are powers of two
def _remembered(count: int) -> Int:
    found = np.arange(count)
    found.flags.writeable = False
    return found
