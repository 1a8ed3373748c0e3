"""Everything the two engines share: configuration, scheduler, model maths, weights, batch runs, the command line."""

from common.version import LOPA_VERSION

__all__ = ["LOPA_VERSION"]
