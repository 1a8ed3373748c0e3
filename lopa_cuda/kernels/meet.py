"""What ranks do together that write one another's memory: meet, or stack a small tensor of each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_cuda.kernels.launch import (
    meet_ranks,
    overlap,
    receive_from_rank,
    release_successor,
    send_to_ranks,
    start_after_predecessor,
)

STACK_BLOCK = 1024  # values of a program


@triton.jit(do_not_specialize=["place"])
def _meet_kernel(flags_ptr, place, RANK: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr):
    release_successor(PDL)
    start_after_predecessor(PDL)
    meet_ranks(flags_ptr, place, RANK, RANKS)


@triton.jit
def _stack_kernel(
    bits_ptr, stacked_ptr, inboxes_ptr, turns_ptr, num_values, stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    release_successor(PDL)
    value = block * BLOCK + tl.arange(0, BLOCK)
    mask = value < num_values
    start_after_predecessor(PDL)
    turn = tl.load(turns_ptr + block)
    place = turn * RANKS * stride + value
    own = send_to_ranks(tl.load(bits_ptr + value, mask=mask, other=0), inboxes_ptr, place, mask, stride, RANK, RANKS)
    for rank in tl.static_range(RANKS):
        bits = own
        if rank != RANK:
            bits = receive_from_rank(inboxes_ptr, place, mask, stride, rank, RANK, tl.int32)
        tl.store(stacked_ptr + rank * num_values + value, bits, mask=mask)
    tl.store(turns_ptr + block, 1 - turn)


def meet(flags_P: Tensor, place: int, rank: int) -> None:
    """Wait until every rank is here; each then sees what the others have written before it. Collective over the ranks,
    at one of their places, of which they use at least two in turn.

    flags_P: int64 addresses of every rank's flags, int32 [places, P], zero between meetings; P is a power of two.
    """
    _meet_kernel[(1,)](flags_P, place, RANK=rank, RANKS=len(flags_P), num_warps=1, **overlap())


def stack_of_ranks(x: Tensor, inboxes_P: Tensor, stride: int, turns: Tensor, rank: int) -> Tensor:
    """float32 [...] of every rank -> [P, ...]. Collective over the ranks, whose x have one shape.

    inboxes_P: int64 addresses of every rank's inboxes, int32 [2, P, stride] by the sending rank, EMPTY between
    launches; stride values at most. turns: this rank's, int32, zero at first: which inbox each block of values is for.
    """
    assert x.dtype == torch.float32 and x.is_contiguous()
    out = torch.empty((len(inboxes_P), *x.shape), dtype=x.dtype, device=x.device)
    _stack_kernel[(max(1, triton.cdiv(x.numel(), STACK_BLOCK)),)](
        x.view(torch.int32), out.view(torch.int32), inboxes_P, turns, x.numel(), stride,
        RANK=rank, RANKS=len(inboxes_P), BLOCK=STACK_BLOCK, num_warps=4, **overlap(),
    )  # fmt: skip
    return out
