"""The CUDA engine: full-window attention over a static KV cache, committed in two phases. Also runs on CPU."""

from common import LOPA_VERSION as __version__

__all__ = ["__version__"]
