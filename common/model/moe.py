"""Mixtures of experts: which experts a token goes to, and the plain version of what they compute.

Shapes: T tokens, D model width, E experts, G groups of them, C chosen experts of a token, X MLP width of an expert. A
tensor-parallel rank holds whole experts, consecutive ones, and its share of the shared experts' MLP; the router is on
every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from common.checkpoint import MoEConfig
from common.model.ops import swiglu
from common.model.parameters import MoE
from quant.experts import expert_linear


class Routing(NamedTuple):
    """expert_TC: ids of a token's experts, the best first; weight_TC: float32, what their results are multiplied by."""

    expert_TC: Tensor
    weight_TC: Tensor


def route(x_TD: Tensor, moe: MoE) -> Routing:
    """Choose experts by scores in float32; those with equal scores come in the order of their ids. All shapes follow
    from T alone."""
    return choose_experts(functional.linear(x_TD.float(), moe.router), moe.expert_bias, moe.config)


def choose_experts(logits_TE: Tensor, bias_E: Tensor | None, config: MoEConfig) -> Routing:
    """Choose experts as `route` does, by float32 logits.

    With `config.capacity` tokens 0, block_size, ... begin a block; only padding may make the last one shorter.
    """
    scores_TE = logits_TE.sigmoid() if config.scoring == "sigmoid" else logits_TE.softmax(dim=-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if config.capacity:
        choice_TE = _among_admitted(choice_TE, config)
    elif config.top_groups < config.num_groups:
        choice_TE = _in_best_groups(choice_TE, config)
    expert_TC = best_columns(choice_TE, config.experts_per_token)
    weight_TC = scores_TE.gather(1, expert_TC)
    if config.normalise:
        weight_TC = weight_TC / (weight_TC.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(expert_TC, weight_TC * config.scaling)


def mixture(x_TD: Tensor, moe: MoE) -> Tensor:
    """Return the weighted sum of this rank's experts, summed in float32, and its share of the shared experts: [T,
    D]."""
    expert_TC, weight_TC = route(x_TD, moe)
    mixed_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for number in range(len(moe.experts_gate_up)):
        token_N, place_N = (expert_TC == moe.first_expert + number).nonzero(as_tuple=True)
        if len(token_N):
            scales = moe.experts_gate_up_scale, moe.experts_down_scale
            gate_up_scale_O, down_scale_O = (None if scale_EO is None else scale_EO[number] for scale_EO in scales)
            inner_NX = swiglu(expert_linear(x_TD[token_N], moe.experts_gate_up[number], gate_up_scale_O))
            result_ND = expert_linear(inner_NX, moe.experts_down[number], down_scale_O).float()
            mixed_TD.index_add_(0, token_N, result_ND * weight_TC[token_N, place_N, None])
    if moe.shared_gate_up_proj is not None and moe.shared_down_proj is not None:
        mixed_TD += moe.shared_down_proj(swiglu(moe.shared_gate_up_proj(x_TD)))
    return mixed_TD.to(x_TD.dtype)


def _in_best_groups(choice_TE: Tensor, config: MoEConfig) -> Tensor:
    """Set scores outside the best groups to -inf; a group's score is the sum of its two largest."""
    choice_TGE = choice_TE.view(len(choice_TE), config.num_groups, -1)
    best_TG = best_columns(choice_TGE.topk(2, dim=-1).values.sum(dim=-1), config.top_groups)
    is_out_TG = torch.ones(choice_TGE.shape[:2], dtype=torch.bool, device=choice_TE.device).scatter_(1, best_TG, False)
    return choice_TGE.masked_fill(is_out_TG[:, :, None], -torch.inf).flatten(1)


def _among_admitted(choice_TE: Tensor, config: MoEConfig) -> Tensor:
    """Set scores of experts that a token's block does not admit to -inf; a block's score of an expert is the largest of
    its tokens'."""
    num_tokens, num_experts = choice_TE.shape
    num_missing = -num_tokens % config.block_size
    blocks_NBE = functional.pad(choice_TE, (0, 0, 0, num_missing), value=-torch.inf).view(
        -1, config.block_size, num_experts
    )
    admitted_NA = best_columns(blocks_NBE.amax(dim=1), config.capacity)
    is_out_NE = torch.ones((len(admitted_NA), num_experts), dtype=torch.bool, device=choice_TE.device)
    is_out_NE = is_out_NE.scatter_(1, admitted_NA, False)
    return blocks_NBE.masked_fill(is_out_NE[:, None], -torch.inf).flatten(0, 1)[:num_tokens]


def best_columns(scores_TN: Tensor, count: int) -> Tensor:
    """Return the best, equal scores in the order of their ids, which topk leaves open."""
    return scores_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]
