"""Turns logits into (token, probability, confidence): float32 statistics that a vocabulary-parallel head merges.

Each tensor-parallel rank reduces its shard of the vocabulary to a few numbers a position; the shards' numbers are
merged and full logits are never gathered. One shard is the case tp = 1. Token confidences (`sampling_strategy`):
`default` p1, `margin` p1 - p2, `neg_entropy` sum p log p, or another of `common/policies/token_confidences`. The mask
id takes no part in the distribution.

What has no part in the distribution gets a logit of -1e30 instead of minus infinity: its weight is 0 either way, and
products with it need no second look. Every operation here is a kernel on a device, so there are few.

Shapes: N positions, V the shard's vocabulary, P shards, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.config import NUM_CANDIDATES
from common.decoding import Sampling
from common.model.noise import SamplingRows, gumbel_noise
from common.policies import Token, policy

Gather = Callable[[Tensor], Tensor]  # stacks the shards' values along a new first dimension
NUM_STATISTICS = 6
NEVER = -1e30
_MAX, _ID, _SECOND, SUM, PRODUCT, _CHOSEN = range(NUM_STATISTICS)


def shard_statistics(logits_NV: Tensor, vocab_start: int, sampling: Sampling) -> Tensor:
    """[N, 6] float32: max, its id, second max (for `margin`), sum exp(l - max), sum exp(l - max) l (for `neg_entropy`),
    and the chosen token's logit (the max). What the strategy does not look at holds some other of these."""
    logits_NV = _without(logits_NV.float(), sampling.mask_token_id - vocab_start)
    max_N, column_N = logits_NV.max(dim=-1)
    return _statistics(logits_NV, max_N, column_N, max_N, vocab_start, sampling.strategy)


def merge_statistics(statistics_PN6: Tensor, strategy: str) -> Tensor:
    """[N, 3] float32: token id, its probability, its confidence. Ties between shards go to the lower id."""
    max_N, shard_N = statistics_PN6[..., _MAX].max(dim=0)  # not amax, which does not lower to GE
    return _merged(statistics_PN6, max_N, shard_N, strategy, is_best=True)


def sampled_statistics(
    logits_NV: Tensor, vocab_start: int, sampling: Sampling, noise: SamplingRows, gather: Gather
) -> Tensor:
    """[N, 3]: a sample by Gumbel noise (at temperature 0 the most probable token), its probability, and the confidence
    of the distribution: of the logits as they are or, where sampling.tempers_confidence, of those that it is drawn by,
    divided by the temperature and cut.

    Where sampling.is_cut, rows without top_p and top_k draw from all of the vocabulary all the same.
    A row's result depends on its own logits and settings alone, and its token not on the number of shards.
    """
    logits_NV = _without(logits_NV.float(), sampling.mask_token_id - vocab_start)
    drawn_NV = logits_NV / noise.temperature_N[:, None]
    if sampling.is_cut:
        best_NC = drawn_NV.topk(min(NUM_CANDIDATES, drawn_NV.shape[1]), dim=-1).values
        mass_N1 = (drawn_NV - best_NC[:, :1]).exp_().sum(-1, keepdim=True)
        edge_N1 = cut_edge(best_NC, mass_N1, noise, gather)
        drawn_NV = drawn_NV.masked_fill(drawn_NV < edge_N1, NEVER)
    noise_NV = gumbel_noise(noise, vocab_start, drawn_NV.shape[1])
    score_N, column_N = torch.addcmul(drawn_NV, noise_NV, noise.noise_N[:, None], value=-1).max(dim=-1)
    logits_NV = drawn_NV if sampling.tempers_confidence else logits_NV
    chosen_N = logits_NV.gather(1, column_N[:, None])[:, 0]
    max_N = logits_NV.max(dim=-1).values
    statistics_N6 = _statistics(logits_NV, max_N, column_N, chosen_N, vocab_start, sampling.strategy)
    return merge_sampled(gather(torch.cat((statistics_N6, score_N[:, None]), dim=-1)), sampling.strategy)


def merge_sampled(statistics_PN7: Tensor, strategy: str) -> Tensor:
    """[N, 3] float32, as `sampled_statistics`. Each shard has the six statistics of its own sample, and that sample's
    logit over temperature with its noise; the highest of these is drawn."""
    max_N, shard_N = statistics_PN7[..., _MAX].max(dim=0).values, statistics_PN7[..., -1].max(dim=0).indices
    return _merged(statistics_PN7, max_N, shard_N, strategy, is_best=False)


def _without(logits_NV: Tensor, column: int) -> Tensor:
    """float32 logits with the mask id out of reach, in place unless gradients are wanted."""
    if 0 <= column < logits_NV.shape[1]:
        logits_NV = logits_NV.clone() if logits_NV.requires_grad else logits_NV
        logits_NV[:, column].fill_(NEVER)
    return logits_NV


def _statistics(
    logits_NV: Tensor, max_N: Tensor, column_N: Tensor, chosen_N: Tensor, vocab_start: int, strategy: str
) -> Tensor:
    """[N, 6]; column_N is where the chosen token stands."""
    weight_NV = (logits_NV - max_N[:, None]).exp_()
    sum_N = weight_NV.sum(-1)
    second_N = logits_NV.topk(2, dim=-1).values[:, 1] if strategy not in ("default", "neg_entropy") else max_N
    product_N = weight_NV.mul_(logits_NV).sum(-1) if has_product(strategy) else sum_N
    return torch.stack((max_N, column_N.float() + vocab_start, second_N, sum_N, product_N, chosen_N), dim=-1)


def _merged(statistics_PNX: Tensor, max_N: Tensor, shard_N: Tensor, strategy: str, *, is_best: bool) -> Tensor:
    """[N, 3] float32. shard_N: whose chosen token it is. is_best: each shard chose its most probable token."""
    index_1NX = shard_N[None, :, None].expand(1, -1, statistics_PNX.shape[-1])
    picked_NX = statistics_PNX.gather(0, index_1NX)[0]
    scale_PN1 = (statistics_PNX[..., :1] - max_N[:, None]).exp()
    sum_N, product_N = (statistics_PNX[..., SUM : PRODUCT + 1] * scale_PN1).sum(dim=0).unbind(-1)
    best_N, token_N = sum_N.reciprocal(), picked_NX[:, _ID]
    probability_N = best_N if is_best else (picked_NX[:, _CHOSEN] - max_N).exp() * best_N
    if strategy == "default":
        return torch.stack((token_N, probability_N, probability_N), dim=-1)
    negative_entropy_N = product_N * best_N - max_N - sum_N.log() if has_product(strategy) else best_N
    if strategy == "neg_entropy":
        return torch.stack((token_N, probability_N, negative_entropy_N), dim=-1)
    two_2N = torch.cat((statistics_PNX[..., _MAX], statistics_PNX[..., _SECOND])).topk(2, dim=0).values
    second_N = (two_2N[1] - max_N).exp() * best_N
    token = Token(probability_N, best_N, second_N, negative_entropy_N)
    return torch.stack((token_N, probability_N, policy("token_confidences", strategy)(token)), dim=-1)


def has_product(strategy: str) -> bool:
    """Whether the confidence needs sum exp(l - max) l, as all but two do."""
    return strategy not in ("default", "margin")


def cut_edge(best_NC: Tensor, mass_N1: Tensor, noise: SamplingRows, gather: Gather) -> Tensor:
    """[N, 1]: the lowest logit that top_p and top_k keep of each row; what ties with it stays.

    best_NC: the best C logits of this shard, or all of them, in descending order. mass_N1: sum exp(l - the best) over
    the shard. The edge is looked for among the best C of all shards; top_p is a share of the mass of all of them.
    """
    num_columns = best_NC.shape[1]
    if num_columns < NUM_CANDIDATES:
        best_NC = torch.nn.functional.pad(best_NC, (0, NUM_CANDIDATES - num_columns), value=NEVER)
    shards_PNX = gather(torch.cat((best_NC, mass_N1), dim=-1))
    best_PNC = shards_PNX[..., :-1]
    best_NC = best_PNC.transpose(0, 1).flatten(1).topk(NUM_CANDIDATES, dim=-1).values
    max_N1 = best_NC[:, :1]
    total_N1 = (shards_PNX[..., -1:] * (best_PNC[..., :1] - max_N1).exp()).sum(dim=0)
    weight_NC = (best_NC - max_N1).exp()
    before_NC = weight_NC.cumsum(-1) - weight_NC
    top_p_N1, top_k_N1 = noise.top_p_N[:, None], noise.top_k_N[:, None]
    num_kept_N1 = (before_NC < top_p_N1 * total_N1).float().sum(-1, keepdim=True)
    num_kept_N1 = torch.where(top_k_N1 > 0, torch.minimum(num_kept_N1, top_k_N1), num_kept_N1).long()
    edge_N1 = best_NC.gather(1, (num_kept_N1 - 1).clamp_(min=0))
    return torch.where((top_p_N1 < 1) | (top_k_N1 > 0), edge_N1, NEVER)
