"""The Ascend engine: block-wise causal attention over paged KV, committed in one phase. Also runs on CPU."""

from common import LOPA_VERSION as __version__

__all__ = ["__version__"]
