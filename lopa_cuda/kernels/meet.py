"""A meeting of ranks that write one another's memory: after it each sees what the others have written before it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lopa_cuda.kernels.launch import meet_ranks, overlap, release_successor, start_after_predecessor


@triton.jit(do_not_specialize=["place"])
def _meet_kernel(flags_ptr, place, RANK: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr):
    release_successor(PDL)
    start_after_predecessor(PDL)
    meet_ranks(flags_ptr, place, RANK, RANKS)


def meet(flags_P: Tensor, place: int, rank: int) -> None:
    """Collective over the ranks, at one of their places, of which they use at least two in turn.

    flags_P: int64 addresses of every rank's flags, int32 [places, P], zero between meetings; P is a power of two.
    """
    _meet_kernel[(1,)](flags_P, place, RANK=rank, RANKS=len(flags_P), num_warps=1, **overlap())
