"""What ranks exchange through one another's memory: sums over tp, alone or inside a norm, head statistics over tp, and
keys and values over bp.

`exchange`, the sums inside norms and stacked statistics, and `peer_staging`, keys and values of shared prompts, need
Triton and are imported by name.
"""

from lopa_cuda.parallel.all_reduce import build_collectives

__all__ = ["build_collectives"]
