"""Token, probability and confidence from bf16 logits: one pass over the vocabulary that writes no fp32 logits.

It follows the head linear. `head_statistics` reduces this rank's shard to 6 numbers a position, as
common.model.sampling.shard_statistics does, first per part of the vocabulary, then over the parts; `merge_statistics`
merges the shards of all tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.decoding import Sampling
from common.model import NUM_STATISTICS, UNIFORM_SCALE, SamplingRows, column_keys
from lopa_cuda.kernels.launch import overlap, release_successor, start_after_predecessor

BLOCK_VOCAB = 8192
NEVER = tl.constexpr(-1e30)  # the logit of what cannot be drawn, as in common.model.sampling
CONFIDENCES = ("default", "margin", "neg_entropy")


@triton.jit
def _two_best(value, column):
    """(max, the lowest column that has it, second max); equal values count one by one, as in topk."""
    best = tl.max(value, axis=0)
    best_column = tl.min(tl.where(value == best, column, 2147483647), axis=0)
    second = tl.max(tl.where(column == best_column, float("-inf"), value), axis=0)
    return best, best_column, second


@triton.jit
def _vocabulary_part_kernel(
    logits_ptr, part_ptr, num_parts, vocab_size, mask_column, row_stride,
    STRATEGY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Reduce a part to its max, the max's column, the second max for `margin`, sum exp(l - max), sum exp(l - max) l for
    `neg_entropy`."""
    position, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    release_successor(PDL)
    column = part * BLOCK + tl.arange(0, BLOCK)
    start_after_predecessor(PDL)
    logit = tl.load(
        logits_ptr + position * row_stride + column, mask=column < vocab_size, other=float("-inf"),
        eviction_policy="evict_first",
    ).to(tl.float32)  # fmt: skip
    # In the load's mask it would keep eight columns from being loaded at once.
    if mask_column // BLOCK == part:
        logit = tl.where(column == mask_column, float("-inf"), logit)
    best, best_column, second = _two_best(logit, column)
    weight = tl.exp(logit - tl.where(best == float("-inf"), 0.0, best))
    at = part_ptr + (position * num_parts + part) * 8
    tl.store(at, best)
    tl.store(at + 1, best_column.to(tl.float32))
    if STRATEGY == 1:
        tl.store(at + 2, second)
    tl.store(at + 3, tl.sum(weight, axis=0))
    if STRATEGY == 2:
        tl.store(at + 4, tl.sum(tl.where(weight > 0, weight * logit, 0.0), axis=0))


@triton.jit
def _sampled_part_kernel(
    logits_ptr, part_ptr, temperature_ptr, noise_ptr, key_ptr, factor_ptr, column_key_ptr, column_factor_ptr, edge_ptr,
    num_parts, vocab_size, mask_column, row_stride, TEMPERS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """common.model.sampling.sampled_statistics of one part: seven numbers, the sample among them. TEMPERS: they are
    those of the distribution that it is drawn from."""
    position, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    release_successor(PDL)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < vocab_size
    start_after_predecessor(PDL)
    temperature = tl.load(temperature_ptr + position)
    logit = tl.load(
        logits_ptr + position * row_stride + column, mask=is_inside, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    can_be_drawn = is_inside & (column != mask_column)
    tempered = tl.where(can_be_drawn, tl.math.div_rn(logit, temperature), NEVER)
    if edge_ptr is not None:
        tempered = tl.where(tempered < tl.load(edge_ptr + position), NEVER, tempered)
    score = tempered
    scale = tl.load(noise_ptr + position)
    if scale > 0:  # greedy rows have none
        first = tl.load(column_key_ptr + column, mask=is_inside, other=0) ^ tl.load(key_ptr + position)
        second = tl.load(column_factor_ptr + column, mask=is_inside, other=0) ^ tl.load(factor_ptr + position)
        uniform = 0.5 - (first * second).to(tl.float32) * SCALE
        score = tempered - tl.log(-tl.log(uniform))
    drawn, drawn_column, _ = _two_best(score, column)
    logit = tempered if TEMPERS else tl.where(can_be_drawn, logit, NEVER)
    best, _, second_best = _two_best(logit, column)
    weight = tl.exp(logit - best)
    at = part_ptr + (position * num_parts + part) * 8
    tl.store(at, best)
    tl.store(at + 1, drawn_column.to(tl.float32))
    tl.store(at + 2, second_best)
    tl.store(at + 3, tl.sum(weight, axis=0))
    tl.store(at + 4, tl.sum(weight * logit, axis=0))
    tl.store(at + 5, tl.sum(tl.where(column == drawn_column, logit, 0.0), axis=0))
    tl.store(at + 6, drawn)


@triton.jit
def _sampled_merge_kernel(part_ptr, out_ptr, num_parts, vocab_start, BLOCK: tl.constexpr, PDL: tl.constexpr):
    position = tl.program_id(0).to(tl.int64)
    release_successor(PDL)
    part = tl.arange(0, BLOCK)
    is_part = part < num_parts
    start_after_predecessor(PDL)
    at = part_ptr + (position * num_parts + part) * 8
    part_best = tl.load(at, mask=is_part, other=float("-inf"))
    part_second = tl.load(at + 2, mask=is_part, other=float("-inf"))
    best, best_part, runner_up = _two_best(part_best, part)
    second = tl.maximum(runner_up, tl.max(tl.where(part == best_part, part_second, float("-inf")), axis=0))
    scale = tl.exp(part_best - best)
    drawn, winner, _ = _two_best(tl.load(at + 6, mask=is_part, other=float("-inf")), part)
    column = tl.sum(tl.where(part == winner, tl.load(at + 1, mask=is_part, other=0.0), 0.0), axis=0)
    chosen = tl.sum(tl.where(part == winner, tl.load(at + 5, mask=is_part, other=0.0), 0.0), axis=0)
    out = out_ptr + position * 7
    tl.store(out, best)
    tl.store(out + 1, column + vocab_start)
    tl.store(out + 2, second)
    tl.store(out + 3, tl.sum(scale * tl.load(at + 3, mask=is_part, other=0.0), axis=0))
    tl.store(out + 4, tl.sum(scale * tl.load(at + 4, mask=is_part, other=0.0), axis=0))
    tl.store(out + 5, chosen)
    tl.store(out + 6, drawn)


@triton.jit
def _vocabulary_merge_kernel(
    part_ptr, out_ptr, num_parts, vocab_start, STRATEGY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    position = tl.program_id(0).to(tl.int64)
    release_successor(PDL)
    part = tl.arange(0, BLOCK)
    is_part = part < num_parts
    start_after_predecessor(PDL)
    at = part_ptr + (position * num_parts + part) * 8
    part_best = tl.load(at, mask=is_part, other=float("-inf"))
    part_column = tl.load(at + 1, mask=is_part, other=0.0)
    best, winner, second = _two_best(part_best, part)
    if STRATEGY == 1:
        part_second = tl.load(at + 2, mask=is_part, other=float("-inf"))
        second = tl.maximum(second, tl.max(tl.where(part == winner, part_second, float("-inf")), axis=0))
    column = tl.sum(tl.where(part == winner, part_column, 0.0), axis=0)
    scale = tl.exp(part_best - best)
    total = tl.sum(scale * tl.load(at + 3, mask=is_part, other=0.0), axis=0)
    product = total
    if STRATEGY == 2:
        product = tl.sum(scale * tl.load(at + 4, mask=is_part, other=0.0), axis=0)
    out = out_ptr + position * 6
    tl.store(out, best)
    tl.store(out + 1, column + vocab_start)
    tl.store(out + 2, second)
    tl.store(out + 3, total)
    tl.store(out + 4, product)
    tl.store(out + 5, best)


@triton.jit
def _shard_merge_kernel(
    statistics_ptr, out_ptr, num_shards, num_positions, STRATEGY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    position = tl.program_id(0).to(tl.int64)
    release_successor(PDL)
    shard = tl.arange(0, BLOCK)
    is_shard = shard < num_shards
    start_after_predecessor(PDL)
    at = statistics_ptr + (shard * num_positions + position) * 6
    shard_best = tl.load(at, mask=is_shard, other=float("-inf"))
    best, _, runner_up = _two_best(shard_best, shard)
    scale = tl.exp(shard_best - best)
    total = tl.sum(scale * tl.load(at + 3, mask=is_shard, other=0.0), axis=0)
    log_total = best + tl.log(total)
    chosen_logit, winner, _ = _two_best(tl.load(at + 5, mask=is_shard, other=float("-inf")), shard)
    token = tl.sum(tl.where(shard == winner, tl.load(at + 1, mask=is_shard, other=0.0), 0.0), axis=0)
    probability = tl.exp(chosen_logit - log_total)
    confidence = probability
    if STRATEGY == 1:
        # The second best is the best one's own second, or the best of another shard.
        own_second = tl.where(shard_best == best, tl.load(at + 2, mask=is_shard, other=float("-inf")), float("-inf"))
        second = tl.maximum(runner_up, tl.max(own_second, axis=0))
        confidence = tl.exp(best - log_total) - tl.exp(second - log_total)
    if STRATEGY == 2:
        product = tl.sum(scale * tl.load(at + 4, mask=is_shard, other=0.0), axis=0)
        confidence = product / total - log_total
    out = out_ptr + position * 3
    tl.store(out, token)
    tl.store(out + 1, probability)
    tl.store(out + 2, confidence)


def head_statistics(logits_NV: Tensor, vocab_start: int, sampling: Sampling) -> Tensor:
    """common.model.sampling.shard_statistics in one pass over bf16 logits: fp32 [N, 6]; ties go to the lower id.

    vocab_start: id of the shard's first column. The logits are not changed.
    """
    strategy = CONFIDENCES.index(sampling.strategy)
    num_positions, vocab_size = logits_NV.shape
    assert logits_NV.stride(1) == 1
    num_parts = triton.cdiv(vocab_size, BLOCK_VOCAB)
    part = torch.empty((num_positions, num_parts, 8), dtype=torch.float32, device=logits_NV.device)
    out_N6 = torch.empty((num_positions, NUM_STATISTICS), dtype=torch.float32, device=logits_NV.device)
    block = min(BLOCK_VOCAB, triton.next_power_of_2(vocab_size))
    _vocabulary_part_kernel[(num_positions, num_parts)](
        logits_NV, part, num_parts, vocab_size, sampling.mask_token_id - vocab_start, logits_NV.stride(0),
        STRATEGY=strategy, BLOCK=block, num_warps=8, **overlap(),
    )  # fmt: skip
    _vocabulary_merge_kernel[(num_positions,)](
        part, out_N6, num_parts, vocab_start,
        STRATEGY=strategy, BLOCK=triton.next_power_of_2(num_parts), num_warps=1, **overlap(),
    )  # fmt: skip
    return out_N6


def sampled_statistics(
    logits_NV: Tensor, vocab_start: int, mask_token_id: int, rows: SamplingRows, edge_N1: Tensor | None,
    *, tempers_confidence: bool,
) -> Tensor:  # fmt: skip
    """One shard's part of common.model.sampling.sampled_statistics in one pass over bf16 logits: fp32 [N, 7], what
    `merge_sampled` merges. edge_N1: the lowest logit over temperature that may be drawn; None: any.
    tempers_confidence: the statistics are of logits over temperature that may be drawn, not of the logits.
    """
    num_positions, vocab_size = logits_NV.shape
    assert logits_NV.stride(1) == 1
    num_parts = triton.cdiv(vocab_size, BLOCK_VOCAB)
    part = torch.empty((num_positions, num_parts, 8), dtype=torch.float32, device=logits_NV.device)
    out_N7 = torch.empty((num_positions, NUM_STATISTICS + 1), dtype=torch.float32, device=logits_NV.device)
    block = min(BLOCK_VOCAB, triton.next_power_of_2(vocab_size))
    key_V, factor_V = column_keys(vocab_start, vocab_size, logits_NV.device)
    _sampled_part_kernel[(num_positions, num_parts)](
        logits_NV, part, rows.temperature_N, rows.noise_N, rows.key_N, rows.factor_N, key_V, factor_V, edge_N1,
        num_parts, vocab_size, mask_token_id - vocab_start, logits_NV.stride(0), TEMPERS=tempers_confidence,
        SCALE=UNIFORM_SCALE, BLOCK=block, num_warps=8, **overlap(),
    )  # fmt: skip
    _sampled_merge_kernel[(num_positions,)](
        part, out_N7, num_parts, vocab_start, BLOCK=triton.next_power_of_2(num_parts), num_warps=1, **overlap()
    )
    return out_N7


def merge_statistics(statistics_PN6: Tensor, strategy: Literal["default", "margin", "neg_entropy"]) -> Tensor:
    """common.model.sampling.merge_statistics in one launch: [P, N, 6] of P vocabulary shards -> fp32 [N, 3]."""
    assert statistics_PN6.is_contiguous() and statistics_PN6.dtype == torch.float32
    num_shards, num_positions, _ = statistics_PN6.shape
    out_N3 = torch.empty((num_positions, 3), dtype=torch.float32, device=statistics_PN6.device)
    _shard_merge_kernel[(num_positions,)](
        statistics_PN6, out_N3, num_shards, num_positions, STRATEGY=CONFIDENCES.index(strategy),
        BLOCK=triton.next_power_of_2(num_shards), num_warps=1, **overlap(),
    )  # fmt: skip
    return out_N3
