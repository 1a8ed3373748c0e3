"""Rows of several tensors at once: all of them, or those of an index.

It copies what the layers leave for the head to where every captured size finds it, and takes from there what is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lopa_cuda.kernels.launch import KEEP, overlap, release_successor, start_after_predecessor

MOST_TENSORS = 3


@triton.jit
def _copy_rows_kernel(
    index_ptr, a_ptr, a_out_ptr, b_ptr, b_out_ptr, c_ptr, c_out_ptr, a_words, b_words, c_words,
    A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    release_successor(PDL)
    start_after_predecessor(PDL)
    source = row
    if index_ptr is not None:
        source = tl.load(index_ptr + row).to(tl.int64)
    _copy_row(a_ptr, a_out_ptr, source, row, a_words, A_BLOCK)
    if b_ptr is not None:
        _copy_row(b_ptr, b_out_ptr, source, row, b_words, B_BLOCK)
    if c_ptr is not None:
        _copy_row(c_ptr, c_out_ptr, source, row, c_words, C_BLOCK)


@triton.jit
def _copy_row(in_ptr, out_ptr, source, row, words, BLOCK: tl.constexpr):
    word = tl.arange(0, BLOCK)
    mask = word < words
    values = tl.load(in_ptr + source * words + word, mask=mask)
    tl.store(out_ptr + row * words + word, values, mask=mask, eviction_policy=KEEP)


def copy_rows(parts: Sequence[Tensor], to: Sequence[Tensor], index_M: Tensor | None = None) -> None:
    """to[i] = parts[i], or parts[i][index]: up to three contiguous tensors whose rows are whole 32-bit words."""
    assert 1 <= len(parts) == len(to) <= MOST_TENSORS
    pairs = [(_words(part), _words(other)) for part, other in zip(parts, to, strict=True)]
    pairs += [(None, None)] * (MOST_TENSORS - len(pairs))
    counts = [part.shape[1] if part is not None else 1 for part, _ in pairs]
    _copy_rows_kernel[(len(to[0]),)](
        index_M, *(pointer for pair in pairs for pointer in pair), *counts, *map(triton.next_power_of_2, counts),
        num_warps=8, **overlap(),
    )  # fmt: skip


def _words(rows_TX: Tensor) -> Tensor:
    """View [T] or [T, X] as [T, X 32-bit words]."""
    assert rows_TX.is_contiguous()
    return (rows_TX[:, None] if rows_TX.dim() == 1 else rows_TX).view(torch.int32)
