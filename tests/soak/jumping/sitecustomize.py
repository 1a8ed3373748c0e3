"""Sets a soak program's wall clock, as Python's `time` tells it, off by what a file says, if on its path.

The monotonic clock is left alone, as a jump of the wall clock leaves it. libfaketime would reach code in C, too, but
Python's locks spin and its sleep fails under it.
"""

import mmap
import os
import struct
import time
from pathlib import Path

_name = os.environ.get("LOPA_SOAK_CLOCK")
if _name:
    with Path(_name).open("rb") as _file:
        _skew = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _seconds, _nanoseconds = time.time, time.time_ns

    def _off() -> int:
        (seconds,) = struct.unpack("q", _skew[:8])
        return int(seconds)

    def _time() -> float:
        return _seconds() + _off()

    def _time_ns() -> int:
        return _nanoseconds() + _off() * 10**9

    time.time, time.time_ns = _time, _time_ns
