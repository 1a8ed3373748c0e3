"""What ranks exchange: gathers and broadcasts over bp, sums over tp, alone or inside a norm.

`exchange`, the sums inside norms, and `peer_staging`, keys and values of shared prompts, need Triton and are imported
by name.
"""

from lopa_cuda.parallel.all_reduce import choose_all_reduce
from lopa_cuda.parallel.collectives import Collectives

__all__ = [
    "Collectives",
    "choose_all_reduce",
]
