"""The environment variables that a profile asks for, in a process that may have begun without them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from common.errors import ConfigError

logger = logging.getLogger(__name__)

# Read once, when the library that they are for is loaded; the second can be made up for.
_READ_WHEN_TORCH_LOADS = ("OMP_", "MKL_", "KMP_", "GOMP_", "ONEDNN_", "ATEN_", "TORCH_DEVICE_BACKEND_AUTOLOAD")
_NUM_THREADS = "OMP_NUM_THREADS"


def check_threads(environment: Mapping[str, str]) -> None:
    """Refuse a number of threads that is none, which OpenMP ignores. Raises ConfigError."""
    given = environment.get(_NUM_THREADS, "1")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in given.split(",")):  # one a level
        raise ConfigError(f"{_NUM_THREADS} is {given!r}: set it to a number of threads, 1 or more, or unset it")


def apply_environment(wanted: Mapping[str, str]) -> None:
    """Set what the user has not set, and say which variables come too late, since torch has been loaded. Raises
    ConfigError for what the user has set to nonsense."""
    check_threads(os.environ)
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    if "torch" not in sys.modules:
        return
    if missing.get(_NUM_THREADS, "").isdecimal():
        sys.modules["torch"].set_num_threads(max(1, int(missing.pop(_NUM_THREADS))))
    late = [name for name in missing if name.startswith(_READ_WHEN_TORCH_LOADS)]
    if late:
        logger.warning("%s: set them before torch is imported, now they act on nothing", ", ".join(late))
