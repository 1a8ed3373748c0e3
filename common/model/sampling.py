"""From logits to (token, probability, confidence): float32 statistics that a vocabulary-parallel head merges.

Each tensor-parallel rank reduces its shard of the vocabulary to a few numbers a position; the shards' numbers are
merged and full logits are never gathered. One shard is the case tp = 1. Token confidences (`sampling_strategy`):
`default` p1, `margin` p1 - p2, `neg_entropy` sum p log p. The mask id takes no part in the distribution.

Shapes: N positions, V the shard's vocabulary, P shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.decoding import Sampling

Reduce = Callable[[Tensor], Tensor]  # sum over the shards
NUM_STATISTICS = 6


class NoiseKeys(NamedTuple):
    """What a position's random numbers depend on; int64 [N] each."""

    request_N: Tensor
    step_N: Tensor
    position_N: Tensor


def shard_statistics(logits_NV: Tensor, vocab_start: int, sampling: Sampling) -> Tensor:
    """[N, 6] float32: max, its id, second max, sum exp(l - max), sum exp(l - max) l, and the chosen token's logit
    (the max)."""
    logits_NV = without_mask(logits_NV, vocab_start, sampling.mask_token_id)
    max_N, second_N = logits_NV.topk(2, dim=-1).values.unbind(-1)
    id_N = logits_NV.argmax(dim=-1) + vocab_start  # topk's own ids do not put ties in order
    is_cut_N = max_N == -torch.inf  # top_p or top_k may leave nothing of a shard
    weight_NV = (logits_NV - max_N.masked_fill(is_cut_N, 0.0)[:, None]).exp()
    product_NV = torch.where(weight_NV > 0, weight_NV * logits_NV, 0.0)
    return torch.stack((max_N, id_N.float(), second_N, weight_NV.sum(-1), product_NV.sum(-1), max_N), dim=-1)


def without_mask(logits_NV: Tensor, vocab_start: int, mask_token_id: int) -> Tensor:
    """float32 logits with the mask id out of reach."""
    logits_NV = logits_NV.float()
    column = mask_token_id - vocab_start
    if 0 <= column < logits_NV.shape[1]:
        logits_NV = logits_NV.clone() if logits_NV.requires_grad else logits_NV
        logits_NV[:, column] = -torch.inf
    return logits_NV


def merge_statistics(statistics_PN6: Tensor, strategy: str) -> Tensor:
    """[N, 3] float32: token id, its probability, its confidence. Ties between shards go to the lower id."""
    max_PN, id_PN, second_PN, sum_PN, product_PN, chosen_PN = statistics_PN6.unbind(-1)
    max_N = max_PN.max(dim=0).values  # not amax, which does not lower to GE
    scale_PN = (max_PN - max_N).exp()
    sum_N = (sum_PN * scale_PN).sum(dim=0)
    winner_N = chosen_PN.argmax(dim=0, keepdim=True)
    log_sum_N = max_N + sum_N.log()
    token_N = id_PN.gather(0, winner_N)[0]
    probability_N = (chosen_PN.gather(0, winner_N)[0] - log_sum_N).exp()
    if strategy == "default":
        return torch.stack((token_N, probability_N, probability_N), dim=-1)
    if strategy == "margin":
        best_2N = torch.cat((max_PN, second_PN)).topk(2, dim=0).values
        best_2N = (best_2N - log_sum_N).exp()
        return torch.stack((token_N, probability_N, best_2N[0] - best_2N[1]), dim=-1)
    negative_entropy_N = (product_PN * scale_PN).sum(dim=0) / sum_N - log_sum_N
    return torch.stack((token_N, probability_N, negative_entropy_N), dim=-1)


def sampled_statistics(
    logits_NV: Tensor, vocab_start: int, sampling: Sampling, keys: NoiseKeys, reduce: Reduce, gather: Reduce
) -> Tensor:
    """[N, 3] at temperature > 0: a sample by Gumbel noise from the distribution cut to top_p and top_k.

    The noise of a token is a hash of (request, step, position, token id), so it does not depend on how rows or
    vocabulary are spread over processes. reduce sums over the shards; gather stacks them along a new first dimension.
    """
    logits_NV = without_mask(logits_NV, vocab_start, sampling.mask_token_id) / sampling.temperature
    logits_NV = _cut(logits_NV, sampling, reduce, gather)
    vocab_V = torch.arange(vocab_start, vocab_start + logits_NV.shape[1], device=logits_NV.device)
    noisy_NV = logits_NV + gumbel_noise(keys, vocab_V)
    noise_max_N, column_N = noisy_NV.max(dim=-1)
    statistics_N6 = shard_statistics(logits_NV, vocab_start, sampling)
    chosen_N = logits_NV.gather(1, column_N[:, None])[:, 0]
    statistics_PN6 = gather(statistics_N6).clone()
    choice_PN3 = gather(torch.stack((noise_max_N, (column_N + vocab_start).float(), chosen_N), dim=-1))
    best_N = choice_PN3[..., 0].argmax(dim=0)
    token_N, logit_N = choice_PN3[best_N, torch.arange(len(best_N), device=best_N.device), 1:].unbind(-1)
    statistics_PN6[..., 1], statistics_PN6[..., 5] = token_N, logit_N
    return merge_statistics(statistics_PN6, sampling.strategy)


def _cut(logits_NV: Tensor, sampling: Sampling, reduce: Reduce, gather: Reduce) -> Tensor:
    """Drop tokens outside the nucleus (top_p) and behind the k best (top_k); ties at the edge stay."""
    if sampling.top_p >= 1 and sampling.top_k is None:
        return logits_NV
    max_N1 = gather(logits_NV.amax(dim=-1, keepdim=True)).amax(dim=0)
    floor_N1 = torch.full_like(max_N1, -torch.inf)
    if sampling.top_p < 1:
        weight_NV = (logits_NV - max_N1).exp()
        total_N1 = reduce(weight_NV.sum(dim=-1, keepdim=True))
        floor_N1 = _edge(logits_NV, weight_NV, total_N1 * sampling.top_p, reduce)
    if sampling.top_k is not None:
        limit_N1 = torch.full_like(max_N1, sampling.top_k - 1)
        floor_N1 = torch.maximum(floor_N1, _edge(logits_NV, torch.ones_like(logits_NV), limit_N1, reduce))
    # The best token always stays, also where rounding puts the edge above it.
    return logits_NV.masked_fill(logits_NV < torch.minimum(floor_N1, max_N1), -torch.inf)


def _edge(logits_NV: Tensor, weight_NV: Tensor, limit_N1: Tensor, reduce: Reduce) -> Tensor:
    """The lowest float t for which the weight strictly above t is at most the limit: bisection over float32's order."""
    low_N1 = torch.full_like(limit_N1, -(2**31) + 2**23, dtype=torch.int64)  # -inf, as an ordered integer
    high_N1 = torch.full_like(limit_N1, 2**31 - 2**23, dtype=torch.int64)  # +inf
    for _ in range(33):
        middle_N1 = torch.div(low_N1 + high_N1, 2, rounding_mode="floor")
        above_N1 = reduce((weight_NV * (logits_NV > _float_of(middle_N1))).sum(dim=-1, keepdim=True))
        fits_N1 = above_N1 <= limit_N1
        high_N1 = torch.where(fits_N1, middle_N1, high_N1)
        low_N1 = torch.where(fits_N1, low_N1, middle_N1)
    return _float_of(high_N1)


def _float_of(ordered: Tensor) -> Tensor:
    """The float32 at this place in the order of all floats: negative ones count down from -1."""
    bits = torch.where(ordered >= 0, ordered, -(2**31) - 1 - ordered)
    return bits.to(torch.int32).view(torch.float32)


def gumbel_noise(keys: NoiseKeys, vocab_V: Tensor) -> Tensor:
    """[N, V] float32 standard Gumbel noise, a pure function of (request, step, position, token id)."""
    state_N = _mix(_mix(_mix(keys.request_N) ^ keys.step_N) ^ keys.position_N)
    bits_NV = (_mix(state_N[:, None] ^ vocab_V) >> 40) & 0xFFFFFF
    uniform_NV = (bits_NV.float() + 0.5) * 2.0**-24
    return -(-uniform_NV.log()).log()


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on wrapping int64."""
    x = x + -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
