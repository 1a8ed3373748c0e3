"""What a few published decoders do with logits, in plain operators: classifier-free guidance, a penalty on the previous
token, and probabilities in which the mask token has a part.

Shapes: N positions, V the shard's vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.decoding import Sampling
from common.model.sampling import PRODUCT, SUM, has_product, shard_statistics


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
