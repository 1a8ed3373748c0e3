"""The operations of a mixture of experts, in the engine's words.

Shapes: T tokens, D model width, E experts, C chosen experts of a token, N = T * C rows, sorted by expert, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.checkpoint import MoEConfig
from common.model import Routing, choose_experts

_TINY = 1e-20  # keeps a sum of scores from being zero


class Dispatched(NamedTuple):
    """rows_ND: a token's row once for each of its experts, sorted by expert. place_N: int32, the place of row
    token * C + choice among them. count_E: int64, rows of each expert. scale_N: of int8 rows; else meaningless."""

    rows_ND: Tensor
    place_N: Tensor
    count_E: Tensor
    scale_N: Tensor


class ExpertOps:
    """A part of `Ops`."""

    _kernels: Any

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, config: MoEConfig) -> Routing:
        """Choose a token's experts (int32) and their weights. Logits and bias are float32, and so are the weights.

        By blocks in torch's own operators: no gating operator takes the tokens of a block together.
        """
        if config.capacity:
            expert_TC, weight_TC = choose_experts(logits_TE, bias_E, config)
            return Routing(expert_TC.int(), weight_TC)
        if config.scoring == "sigmoid":
            weight_TC, expert_TC, _ = self._kernels.npu_moe_gating_top_k(
                logits_TE,
                config.experts_per_token,
                bias=bias_E,
                k_group=config.top_groups,
                group_count=config.num_groups,
                group_select_mode=1,
                renorm=0,
                norm_type=1,
                out_flag=False,
                routed_scaling_factor=config.scaling,
                eps=_TINY,
            )
            return Routing(expert_TC, weight_TC)
        weight_TC, expert_TC, _ = self._kernels.npu_moe_gating_top_k_softmax(logits_TE, None, config.experts_per_token)
        if config.normalise:
            weight_TC = weight_TC / (weight_TC.sum(dim=-1, keepdim=True) + _TINY)
        return Routing(expert_TC, weight_TC * config.scaling)

    def dispatch(self, x_TD: Tensor, expert_TC: Tensor, num_experts: int, scale_T: Tensor | None = None) -> Dispatched:
        """Sort a token's rows by expert. expert_TC: int32, below num_experts. scale_T: float32, of int8 tokens."""
        rows_ND, place_N, count_E, scale_N = self._kernels.npu_moe_init_routing_v2(
            x_TD,
            expert_TC,
            scale=scale_T,
            active_num=expert_TC.numel(),
            expert_num=num_experts,
            drop_pad_mode=0,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=-1,
            active_expert_range=[0, num_experts],
            row_idx_type=0,
        )
        return Dispatched(rows_ND, place_N, count_E, scale_N)

    def grouped_matmul(self, rows_NK: Tensor, weight_EKO: Tensor, count_E: Tensor) -> Tensor:
        """Multiply each expert's rows by its weight. The counts cover all rows; there are two experts or more."""
        return self._grouped(rows_NK, weight_EKO, count_E)

    def grouped_matmul_int32(self, rows_NK: Tensor, weight_EKO: Tensor, count_E: Tensor) -> Tensor:
        """Return the int32 accumulators of int8 rows and weights."""
        return self._grouped(rows_NK, weight_EKO, count_E, output_dtype=torch.int32)

    def grouped_quant_matmul(
        self, rows_NK: Tensor, weight_EKO: Tensor, count_E: Tensor, weight_scale_EO: Tensor, scale_N: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Multiply int8 rows and weights, in real units. weight_scale_EO: bfloat16, as bfloat16 results want it; a
        device has no others."""
        scales = {"scale": [weight_scale_EO], "per_token_scale": [scale_N]}
        return self._grouped(rows_NK, weight_EKO, count_E, output_dtype=dtype, **scales)

    def _grouped(self, rows_NK: Tensor, weight_EKO: Tensor, count_E: Tensor, **options: Any) -> Tensor:
        (product_NO,) = self._kernels.npu_grouped_matmul(
            [rows_NK], [weight_EKO], group_list=count_E, split_item=2, group_type=0, group_list_type=1, **options
        )
        return product_NO

    def combine(self, rows_ND: Tensor, place_N: Tensor, weight_TC: Tensor) -> Tensor:
        """Return the weighted sum of each token's rows [T, D], rounded once. weight_TC: float32."""
        mixed_TD: Tensor = self._kernels.npu_moe_token_unpermute(rows_ND, place_N, weight_TC)
        return mixed_TD


def of_own_experts(routing: Routing, first: int, count: int) -> Routing:
    """Renumber a routing by this rank's experts. Rows of other ranks' experts go to one of its own with weight 0.

    The grouped product's counts have to cover every row, and what lies past them would be garbage, so no row is left
    out: a product of more rows reads the same weights.
    """
    local_TC = routing.expert_TC - first
    is_here_TC = (local_TC >= 0) & (local_TC < count)
    return Routing(local_TC.clamp(0, count - 1), torch.where(is_here_TC, routing.weight_TC, 0.0))
