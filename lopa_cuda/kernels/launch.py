"""What every kernel of this folder shares: overlapped launches, L2 prefetch, split-K sums, per-token quantization.

Kernels of one stream overlap by programmatic dependent launch (PDL, Hopper and later). A small stage lets its successor
start at once, so that the successor's launch and its weight prefetch run under it; a linear does so after its product,
as programs that wait would take room from those that stream. Each waits for its predecessor before it touches anything
that a kernel of this step wrote: only what was there before the step's first kernel may be read before
`start_after_predecessor`: weights, tables, positions and lengths, committed keys.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Quantize = Literal["int8", "fp8"]
QUANTIZED_DTYPE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
QUANTIZED_MAX = {"int8": 127.0, "fp8": 448.0}
IS_INTERPRETED = triton.knobs.runtime.interpret
INTERPRETED = tl.constexpr(IS_INTERPRETED)
# What a stage hands to the next is overwritten in the next layer. Kept in L2 until then it is never written back to
# memory, as the weights that stream by would force it to be.
KEEP = tl.constexpr("evict_last")
EMPTY = tl.constexpr(-1)  # of an inbox that ranks write: bits of a NaN that no operator makes


class Partials(NamedTuple):
    """A linear's output before the sum over its split-K parts: y = sum_Z(values) * weight_scale * x_scale + bias.

    Only `add_rms_norm`, `rope_prewrite` and `sum_partials` read it. values: [Z, T, E] fp32, int32 from int8 operands.
    """

    values: Tensor
    weight_scale: Tensor | None  # fp32 [E]
    x_scale: Tensor | None  # fp32 [T]
    bias: Tensor | None  # [E]; int32 is added before the scales


class Shared(NamedTuple):
    """This rank's addend of a row-parallel linear, and where the tensor-parallel ranks send one another theirs;
    `add_rms_norm` sums.

    inboxes_P: int64 addresses of every rank's inbox, bf16 [P, at least T, E] by the sending rank, whose bits are EMPTY
    between launches. stride: elements from one sender's part to the next. Sums take two inboxes in turn.
    """

    values: Tensor | Partials
    inboxes_P: Tensor
    stride: int
    rank: int


class Mirrors(NamedTuple):
    """Memory that every branch-parallel rank has alike, and that all of them write: `rope_prewrite` does.

    addresses_P: int64, where each rank's begins, this one's too. offset: elements from there to what is written.
    """

    addresses_P: Tensor
    offset: int


@functools.cache
def has_dependent_launch() -> bool:
    return not IS_INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)


def overlap() -> dict[str, bool]:
    """Launch options of every kernel: PDL where the device has it."""
    pdl = has_dependent_launch()
    return {"PDL": pdl, "launch_pdl": pdl} if not IS_INTERPRETED else {"PDL": False}


def partial_arguments(x: Tensor | Partials) -> tuple[tuple[Tensor | None, ...], dict[str, int | bool]]:
    """The pointers (values, weight_scale, x_scale, bias) and the constants that `load_sum` takes."""
    if isinstance(x, Tensor):
        assert x.dtype == torch.bfloat16 and x.is_contiguous(), "kernels take contiguous bf16 activations"
        return (x, None, None, None), {"part_stride": 0, "PARTS": 0, "IS_BIAS_INT": False}
    is_bias_int = x.bias is not None and x.bias.dtype == torch.int32
    stride = x.values.stride(0)
    return tuple(x), {"part_stride": stride, "PARTS": x.values.shape[0], "IS_BIAS_INT": is_bias_int}


@triton.jit
def start_after_predecessor(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def release_successor(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def operand(x):
    """x as an operand of tl.dot; the interpreter would multiply bf16 as the integers it stores them in."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def multiply(acc, x, w, IS_SWAPPED: tl.constexpr, ACCUMULATE: tl.constexpr):
    """acc + x @ w.T, or its transpose: the weight rows then fill the matrix unit where tokens would not. ACCUMULATE:
    channels after which float8 sums leave the unit; None: they stay."""
    x, w = operand(x), operand(w)
    if IS_SWAPPED:
        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=ACCUMULATE, out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=ACCUMULATE, out_dtype=acc.dtype)
    return acc


@triton.jit
def prefetch_l2(address, num_bytes):
    """Start pulling num_bytes (a multiple of 16) at each int64 address into L2; nothing waits for it."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(
    weight_ptr, row0, num_rows, first_byte, row_bytes, num_bytes, ROWS: tl.constexpr, THREADS: tl.constexpr
):
    """Pull num_bytes from first_byte on of ROWS rows into L2, every thread its own run."""
    runs: tl.constexpr = THREADS // ROWS if THREADS > ROWS else 1
    element = tl.arange(0, ROWS * runs)
    run_bytes = num_bytes // runs // 16 * 16
    row = tl.minimum(row0 + element % ROWS, num_rows - 1).to(tl.int64)
    address = weight_ptr.to(tl.int64) + row * row_bytes + first_byte + element // ROWS * run_bytes
    prefetch_l2(address, tl.zeros_like(element) + run_bytes)


@triton.jit
def dequantize(acc, weight_scale_ptr, x_scale, bias_ptr, column, mask, IS_BIAS_INT: tl.constexpr):
    """quant.w8a8.dequantize; without scales and bias just fp32. x_scale: the rows' scales, or None."""
    if bias_ptr is not None and IS_BIAS_INT:
        acc += tl.load(bias_ptr + column, mask=mask, other=0)
    y = acc.to(tl.float32)
    if weight_scale_ptr is not None:
        y *= tl.load(weight_scale_ptr + column, mask=mask, other=0.0)
    if x_scale is not None:
        y *= x_scale
    if bias_ptr is not None and not IS_BIAS_INT:
        y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def load_sum(
    values_ptr, weight_scale_ptr, x_scale_ptr, bias_ptr, token, column, mask, part_stride, num_columns,
    PARTS: tl.constexpr, IS_BIAS_INT: tl.constexpr,
):  # fmt: skip
    """Load fp32 values of one token's columns, from bf16 (PARTS = 0) or summed from split-K parts in their order."""
    offset = token.to(tl.int64) * num_columns + column
    acc = tl.load(values_ptr + offset, mask=mask, other=0)
    if PARTS == 0:
        acc = acc.to(tl.float32)
    else:
        for part in tl.static_range(1, PARTS):
            acc += tl.load(values_ptr + part * part_stride + offset, mask=mask, other=0)
        x_scale = None
        if x_scale_ptr is not None:
            x_scale = tl.load(x_scale_ptr + token)
        # Rounded to bf16 as the unsplit linear's output is, so that the choice of split moves no rounding.
        acc = dequantize(acc, weight_scale_ptr, x_scale, bias_ptr, column, mask, IS_BIAS_INT)
        acc = acc.to(tl.bfloat16).to(tl.float32)
    return acc


@triton.jit
def meet_ranks(flags_ptr, place, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell every rank that this one is here, with all that it has written, and wait for them; flags are left as they
    were found. flags_ptr: addresses of every rank's flags, [places, RANKS]. A place is used again only after another
    one: a peer that has come there is done with this one."""
    peers = tl.arange(0, RANKS)
    theirs = tl.load(flags_ptr + peers).to(tl.pointer_type(tl.int32)) + place * RANKS + RANK
    tl.atomic_add(theirs, 1, sem="release", scope="sys")
    own = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + place * RANKS + peers
    arrived = tl.sum(tl.atomic_add(own, 0, sem="acquire", scope="sys"), axis=0)
    while arrived < RANKS:
        arrived = tl.sum(tl.atomic_add(own, 0, sem="acquire", scope="sys"), axis=0)
    tl.store(own, tl.zeros_like(peers))
    tl.debug_barrier()


@triton.jit
def send_to_ranks(bits, inboxes_ptr, offset, mask, stride, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write the bits of floats to all other ranks' inboxes. Returns what was sent, which is never EMPTY: that is one of
    many NaNs, and another is sent in its place."""
    bits = tl.where(bits == EMPTY, 32767 if bits.dtype == tl.int16 else 2147483647, bits).to(bits.dtype)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            inbox = tl.load(inboxes_ptr + peer).to(tl.pointer_type(bits.dtype))
            tl.store(tl.multiple_of(inbox, 16) + RANK * stride + offset, bits, mask=mask)
    return bits


@triton.jit
def receive_from_rank(inboxes_ptr, offset, mask, stride, SENDER: tl.constexpr, RANK: tl.constexpr, DTYPE: tl.constexpr):
    """Wait for the sender's bits, and leave its part of this rank's inbox empty. Its next bits have to go to another
    inbox: when they are here, it has seen that this rank is done with the one before."""
    inbox = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(DTYPE))
    place = tl.multiple_of(inbox, 16) + SENDER * stride + offset
    bits = tl.load(place, mask=mask, other=0, volatile=True)
    while tl.sum((bits == EMPTY).to(tl.int32), axis=0) > 0:
        bits = tl.load(place, mask=mask, other=0, volatile=True)
    tl.store(place, tl.full(offset.shape, EMPTY, DTYPE), mask=mask)
    return bits


@triton.jit
def sum_of_ranks(x, inboxes_ptr, offset, mask, stride, RANK: tl.constexpr, RANKS: tl.constexpr):
    """fp32 sum of one token's addends over the ranks, in their order, rounded to bf16. x: this rank's."""
    own = send_to_ranks(x.to(tl.bfloat16).to(tl.int16, bitcast=True), inboxes_ptr, offset, mask, stride, RANK, RANKS)
    total = tl.zeros(offset.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        bits = own
        if rank != RANK:
            bits = receive_from_rank(inboxes_ptr, offset, mask, stride, rank, RANK, tl.int16)
        total += bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
    return total.to(tl.bfloat16).to(tl.float32)


@triton.jit
def round_half_even(x):
    """Round fp32 up to 2^22, by adding 1.5 * 2^23."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def divide(x, divisor, reciprocal):
    """x / divisor correctly rounded, from the divisor's correctly rounded reciprocal (Markstein 1990)."""
    quotient = x * reciprocal
    remainder = tl.fma(-quotient, divisor, x)
    return tl.fma(remainder, reciprocal, quotient)


@triton.jit
def quantize_row(y, QUANTIZED_MAX: tl.constexpr, IS_INT: tl.constexpr):
    """(values, scale) of one token: quant.w8a8.quantize_per_token, or quant.fp8's; zeros where y is zero."""
    scale = tl.math.div_rn(tl.max(tl.abs(y), axis=0), QUANTIZED_MAX)
    return quantize_by(y, scale, QUANTIZED_MAX, IS_INT), scale


@triton.jit
def quantize_by(y, scale, QUANTIZED_MAX: tl.constexpr, IS_INT: tl.constexpr):
    """Quantize some of a token's values by its scale."""
    divisor = tl.where(scale > 0, scale, 1.0)
    scaled = divide(y, divisor, tl.math.div_rn(1.0, divisor))
    scaled = tl.minimum(tl.maximum(scaled, -QUANTIZED_MAX), QUANTIZED_MAX)
    return round_half_even(scaled).to(tl.int8) if IS_INT else scaled.to(tl.float8e4nv)
