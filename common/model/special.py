"""What a few published decoders do with logits, in plain operators: classifier-free guidance, a penalty on the previous
token, and probabilities in which the mask token has a part, and the best of several tokens.

Shapes: N positions, V the shard's vocabulary, P shards, C tokens of a position.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from common.decoding import Sampling
from common.model.sampling import NUM_STATISTICS, PRODUCT, SUM, Gather, has_product, merge_statistics, shard_statistics


def changed_logits(
    logits_NV: Tensor, guide_NV: Tensor | None, lowered_N: Tensor, vocab_start: int, sampling: Sampling
) -> Tensor:
    """Return changed logits in float32. guide_NV: u of u + (cfg_scale + 1)(l - u). lowered_N: the token whose logit
    goes down by penalty_lambda, which may be another shard's or none (-1)."""
    logits_NV = logits_NV.float()
    if guide_NV is not None:
        guide_NV = guide_NV.float()
        logits_NV = guide_NV + (sampling.cfg_scale + 1) * (logits_NV - guide_NV)
    if sampling.penalty_lambda:
        column_N = lowered_N.long() - vocab_start
        is_here_N = (lowered_N >= 0) & (column_N >= 0) & (column_N < logits_NV.shape[1])
        amount_N = is_here_N * -sampling.penalty_lambda
        column_N1 = column_N.clamp(0, logits_NV.shape[1] - 1)[:, None]
        logits_NV = logits_NV.scatter_add(1, column_N1, amount_N[:, None].to(logits_NV.dtype))
    return logits_NV


def special_statistics(logits_NV: Tensor, vocab_start: int, sampling: Sampling) -> Tensor:
    """`shard_statistics`; with counts_mask the mask token has its share of the sums, and is never chosen."""
    column = sampling.mask_token_id - vocab_start
    mask_N = logits_NV[:, column].clone() if 0 <= column < logits_NV.shape[1] else None
    statistics_N6 = shard_statistics(logits_NV, vocab_start, sampling)
    if mask_N is None or not sampling.counts_mask:
        return statistics_N6
    weight_N = torch.exp((mask_N - statistics_N6[:, 0]).clamp(max=80.0))  # e^80 is far below float32's largest
    statistics_N6[:, SUM] += weight_N
    statistics_N6[:, PRODUCT] += weight_N * (mask_N if has_product(sampling.strategy) else 1)
    return statistics_N6


def best_statistics(logits_NV: Tensor, vocab_start: int, sampling: Sampling, gather: Gather) -> Tensor:
    """[N, 3 + 2 C] float32: token, probability and confidence as ever, then the C = sampling.num_best most probable
    tokens, of equal ones the lower ids first, and their probabilities. The mask token is among them where it counts."""
    count, mask_column = sampling.num_best, sampling.mask_token_id - vocab_start
    logits_NV = logits_NV.float()
    has_mask = 0 <= mask_column < logits_NV.shape[1]
    mask_N = logits_NV[:, mask_column].clone() if has_mask and sampling.counts_mask else None
    usual_N6 = special_statistics(logits_NV, vocab_start, sampling)  # leaves the mask token out of reach
    if mask_N is not None:
        logits_NV[:, mask_column] = mask_N
    max_N1 = logits_NV.max(dim=-1, keepdim=True).values
    sum_N1 = (logits_NV - max_N1).exp().sum(dim=-1, keepdim=True)
    value_NC, column_NC = logits_NV.topk(min(count, logits_NV.shape[1]), dim=-1)
    id_NC = column_NC.float() + vocab_start
    if value_NC.shape[1] < count:
        missing = 0, count - value_NC.shape[1]
        value_NC = functional.pad(value_NC, missing, value=-1e30)
        id_NC = functional.pad(id_NC, missing, value=-1)
    own_NX = torch.cat((usual_N6, max_N1, sum_N1, value_NC, id_NC), dim=-1)
    shards_PNX = gather(own_NX)
    sizes = [NUM_STATISTICS, 1, 1, count, count]
    usual_PN6, max_PN1, sum_PN1, value_PNC, id_PNC = torch.split(shards_PNX, sizes, dim=-1)
    max_N1 = max_PN1.max(dim=0).values
    total_N1 = (sum_PN1 * (max_PN1 - max_N1).exp()).sum(dim=0)
    value_NX, id_NX = value_PNC.transpose(0, 1).flatten(1), id_PNC.transpose(0, 1).flatten(1)
    order_NX = id_NX.sort(dim=-1, stable=True).indices  # topk leaves the order of equal ones open
    value_NX, id_NX = value_NX.gather(1, order_NX), id_NX.gather(1, order_NX)
    order_NC = value_NX.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    value_NC, id_NC = value_NX.gather(1, order_NC), id_NX.gather(1, order_NC)
    best_NC = (value_NC - max_N1).exp() / total_N1
    return torch.cat((merge_statistics(usual_PN6, sampling.strategy), id_NC, best_NC), dim=-1)
