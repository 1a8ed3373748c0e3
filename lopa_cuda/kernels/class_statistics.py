"""From bf16 logits to statistics of an automaton's classes: common.runtime.classes.class_statistics in two launches.

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
_POSITIONS = 4  # that read a tile's tokens together


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
def _class_kernel(
    part_ptr, tile_ptr, out_ptr, noise_ptr, num_tiles, most_tiles, vocab_start,
    IS_SAMPLED: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    group, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    release_successor(PDL)
    place = tl.arange(0, BLOCK)
    tile = tl.load(tile_ptr + group * most_tiles + place, mask=place < most_tiles, other=num_tiles)
    has_tile = tile < num_tiles
    start_after_predecessor(PDL)
    at = part_ptr + (row * num_tiles + tile) * VALUES
    score = tl.load(at + 5, mask=has_tile, other=NEVER)
    token = tl.load(at, mask=has_tile, other=0.0)
    logit = tl.load(at + 1, mask=has_tile, other=NEVER)
    best, winner, best_logit = _best(score, place, logit)
    mass, mean = tl.load(at + 3, mask=has_tile, other=NEVER), tl.load(at + 4, mask=has_tile, other=NEVER)
    highest = tl.max(mass, axis=0)
    weight = tl.exp(mass - highest)
    total = tl.sum(weight, axis=0)
    drawn_weight = best_logit
    if IS_SAMPLED:
        drawn = tl.load(at + 2, mask=has_tile, other=NEVER)
        top = tl.max(drawn, axis=0)
        drawn = top + tl.log(tl.sum(tl.exp(drawn - top), axis=0))
        drawn_weight = tl.where(tl.load(noise_ptr + row) > 0, drawn, best_logit)
    out = out_ptr + (row * tl.num_programs(0) + group) * VALUES
    tl.store(out, tl.sum(tl.where(place == winner, token, 0.0), axis=0) + vocab_start)
    tl.store(out + 1, best_logit)
    tl.store(out + 2, drawn_weight)
    tl.store(out + 3, highest + tl.log(total))
    tl.store(out + 4, tl.sum(weight * mean, axis=0) / total)
    tl.store(out + 5, best)


def class_statistics(
    logits_NV: Tensor, vocab_start: int, tiles: Tiles, sampling: Sampling, rows: SamplingRows | None
) -> Tensor:
    """fp32 [N, C, 6], as common.runtime.classes.class_statistics has it. The logits are not changed."""
    num_positions, vocab_size = logits_NV.shape
    num_tiles, size = tiles.token_KB.shape
    num_classes, most_tiles = tiles.tile_CX.shape
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
        num_warps=4, **overlap(),
    )  # fmt: skip
    _class_kernel[(num_classes, num_positions)](
        part, tiles.tile_CX, out_NC6, fields[1], num_tiles, most_tiles, vocab_start, IS_SAMPLED=is_sampled,
        BLOCK=triton.next_power_of_2(most_tiles), VALUES=_NUM_VALUES, num_warps=1, **overlap(),
    )  # fmt: skip
    return out_NC6
