"""Is every operation right on this device? Asked before it serves, and by `lopa doctor --selftest`."""

from lopa_ascend.selftest.checks import Sizes
from lopa_ascend.selftest.examine import examine_alone, require_correct

__all__ = [
    "Sizes",
    "examine_alone",
    "require_correct",
]
