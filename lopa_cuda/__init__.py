"""The CUDA engine: attention over the whole window and paged KV, committed in two phases. Also runs on CPU."""

from common import LOPA_VERSION as __version__

__all__ = ["__version__"]
