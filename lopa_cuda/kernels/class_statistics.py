"""Statistics of an automaton's classes from bf16 logits: common.runtime.classes.class_statistics in two launches.

The first reduces every tile of tokens of one class, the second the tiles of each class. Neither adds atomically, so the
order of sums depends on nothing else in the pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.decoding import ClassField, Sampling
from common.model import UNIFORM_SCALE, SamplingRows, column_keys
from common.runtime import Tiles
from lopa_cuda.kernels.head_statistics import NEVER
from lopa_cuda.kernels.launch import overlap, release_successor, start_after_predecessor

_NUM_VALUES = len(ClassField) + 1  # the last is the score that the class's token won by
_POSITIONS = 2  # that read a tile's tokens together
_WARPS = 1  # of a tile: more of them would wait for each other at every reduction
_ROWS, _BLOCK = 4, 32  # positions and tiles of a class that are reduced together


@triton.jit
def _best(score, column, logit):
    """The highest score, the lowest column that has it, and its logit."""
    best = tl.max(score, axis=0)
    best_column = tl.min(tl.where(score == best, column, 2147483647), axis=0)
    return best, best_column, tl.max(tl.where(column == best_column, logit, float("-inf")), axis=0)


@triton.jit
def _tile_kernel(
    logits_ptr, token_ptr, part_ptr, temperature_ptr, noise_ptr, key_ptr, factor_ptr, column_key_ptr, column_factor_ptr,
    num_positions, num_tiles, vocab_size, mask_column, row_stride,
    IS_SAMPLED: tl.constexpr, TEMPERS: tl.constexpr, SCALE: tl.constexpr, POSITIONS: tl.constexpr, SIZE: tl.constexpr,
    VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, first = tl.program_id(0), tl.program_id(1) * POSITIONS
    release_successor(PDL)
    column = tl.load(token_ptr + tile * SIZE + tl.arange(0, SIZE))
    can_be_drawn = (column < vocab_size) & (column != mask_column)
    if IS_SAMPLED:
        own_key = tl.load(column_key_ptr + column, mask=can_be_drawn, other=0)
        own_factor = tl.load(column_factor_ptr + column, mask=can_be_drawn, other=0)
    start_after_predecessor(PDL)
    for number in tl.static_range(POSITIONS):
        # The last program's places beyond the end compute the last position once more.
        row = tl.minimum(first + number, num_positions - 1).to(tl.int64)
        logit = tl.load(logits_ptr + row * row_stride + column, mask=can_be_drawn, other=NEVER).to(tl.float32)
        logit = tl.where(can_be_drawn, logit, NEVER)
        at = part_ptr + (row * num_tiles + tile) * VALUES
        score = logit
        if IS_SAMPLED:
            temperature, scale = tl.load(temperature_ptr + row), tl.load(noise_ptr + row)
            tempered = tl.where(can_be_drawn, tl.math.div_rn(logit, temperature), NEVER)
            score = tempered
            if scale > 0:  # greedy rows have none
                uniform = 0.5 - (
                    (own_key ^ tl.load(key_ptr + row)) * (own_factor ^ tl.load(factor_ptr + row))
                ).to(tl.float32) * SCALE  # fmt: skip
                score = tempered - tl.log(-tl.log(uniform))
            if TEMPERS:
                logit = tempered
            else:
                highest = tl.max(tempered, axis=0)
                tl.store(at + 2, highest + tl.log(tl.sum(tl.exp(tempered - highest), axis=0)))
        best, best_column, best_logit = _best(score, column, logit)
        highest = tl.max(logit, axis=0)
        weight = tl.exp(logit - highest)
        total = tl.sum(weight, axis=0)
        mass = highest + tl.log(total)
        tl.store(at, best_column.to(tl.float32))
        tl.store(at + 1, best_logit)
        if TEMPERS or not IS_SAMPLED:
            tl.store(at + 2, mass)
        tl.store(at + 3, mass)
        tl.store(at + 4, tl.sum(weight * logit, axis=0) / total)
        tl.store(at + 5, best)


@triton.jit
def _log_sum(top, total):
    """log(sum(total exp(top))) over the last dimension."""
    highest = tl.max(top, axis=1)
    return highest + tl.log(tl.sum(total * tl.exp(top - highest[:, None]), axis=1))


@triton.jit
def _class_kernel(
    part_ptr, first_ptr, out_ptr, noise_ptr, num_positions, num_tiles, vocab_start,
    IS_SAMPLED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    release_successor(PDL)
    first, end = tl.load(first_ptr + group), tl.load(first_ptr + group + 1)
    # The last program's rows beyond the end compute the last position once more.
    row = tl.minimum(tl.program_id(1) * ROWS + tl.arange(0, ROWS), num_positions - 1).to(tl.int64)
    start_after_predecessor(PDL)
    lane = tl.full((ROWS, 1), 0, tl.int32) + tl.arange(0, BLOCK)[None, :]
    own, never, zero = first + lane, tl.full((ROWS, BLOCK), NEVER, tl.float32), tl.full((ROWS, BLOCK), 0.0, tl.float32)
    token, score, logit = zero, never, never
    top, total, mean = never, zero + 1.0, never
    top_drawn, total_drawn = never, zero + 1.0
    for begin in range(first, end, BLOCK):
        tile = begin + lane
        at = part_ptr + (row[:, None] * num_tiles + tile) * VALUES
        is_own = tile < end
        found = tl.load(at + 5, mask=is_own, other=NEVER)
        is_better = found > score  # of equal ones the first stays
        score, own = tl.where(is_better, found, score), tl.where(is_better, tile, own)
        token = tl.where(is_better, tl.load(at, mask=is_own, other=0.0), token)
        logit = tl.where(is_better, tl.load(at + 1, mask=is_own, other=NEVER), logit)
        mass, center = tl.load(at + 3, mask=is_own, other=NEVER), tl.load(at + 4, mask=is_own, other=0.0)
        higher = tl.maximum(top, mass)
        kept, weight = total * tl.exp(top - higher), tl.exp(mass - higher)
        top, total = higher, kept + weight
        mean = (kept * mean + weight * center) / total
        if IS_SAMPLED:
            drawn = tl.load(at + 2, mask=is_own, other=NEVER)
            higher = tl.maximum(top_drawn, drawn)
            total_drawn = total_drawn * tl.exp(top_drawn - higher) + tl.exp(drawn - higher)
            top_drawn = higher
    best = tl.max(score, axis=1)
    winner = tl.min(tl.where(score == best[:, None], own, 2147483647), axis=1)
    is_winner = own == winner[:, None]
    best_logit = tl.max(tl.where(is_winner, logit, float("-inf")), axis=1)
    drawn_weight = best_logit
    if IS_SAMPLED:
        drawn_weight = tl.where(tl.load(noise_ptr + row) > 0, _log_sum(top_drawn, total_drawn), best_logit)
    highest = tl.max(top, axis=1)
    weight = total * tl.exp(top - highest[:, None])
    whole = tl.sum(weight, axis=1)
    out = out_ptr + (row * tl.num_programs(0) + group) * VALUES
    tl.store(out, tl.sum(tl.where(is_winner, token, 0.0), axis=1) + vocab_start)
    tl.store(out + 1, best_logit)
    tl.store(out + 2, drawn_weight)
    tl.store(out + 3, highest + tl.log(whole))
    tl.store(out + 4, tl.sum(weight * mean, axis=1) / whole)
    tl.store(out + 5, best)


def class_statistics(
    logits_NV: Tensor, vocab_start: int, tiles: Tiles, sampling: Sampling, rows: SamplingRows | None
) -> Tensor:
    """fp32 [N, C, 6], as common.runtime.classes.class_statistics has it. The logits are not changed."""
    num_positions, vocab_size = logits_NV.shape
    num_tiles, size = tiles.token_KB.shape
    num_classes = len(tiles.first_1C) - 1
    assert logits_NV.stride(1) == 1
    device, is_sampled = logits_NV.device, rows is not None
    part = torch.empty((num_positions, num_tiles, _NUM_VALUES), dtype=torch.float32, device=device)
    out_NC6 = torch.empty((num_positions, num_classes, _NUM_VALUES), dtype=torch.float32, device=device)
    fields = (None,) * 4 if rows is None else (rows.temperature_N, rows.noise_N, rows.key_N, rows.factor_N)
    columns = column_keys(vocab_start, vocab_size, device) if is_sampled else (None, None)
    _tile_kernel[(num_tiles, triton.cdiv(num_positions, _POSITIONS))](
        logits_NV, tiles.token_KB, part, *fields, *columns, num_positions, num_tiles, vocab_size,
        sampling.mask_token_id - vocab_start, logits_NV.stride(0), IS_SAMPLED=is_sampled,
        TEMPERS=sampling.tempers_confidence, SCALE=UNIFORM_SCALE, POSITIONS=_POSITIONS, SIZE=size, VALUES=_NUM_VALUES,
        num_warps=_WARPS, **overlap(),
    )  # fmt: skip
    _class_kernel[(num_classes, triton.cdiv(num_positions, _ROWS))](
        part, tiles.first_1C, out_NC6, fields[1], num_positions, num_tiles, vocab_start, IS_SAMPLED=is_sampled,
        ROWS=_ROWS, BLOCK=_BLOCK, VALUES=_NUM_VALUES, num_warps=1, **overlap(),
    )  # fmt: skip
    return out_NC6
