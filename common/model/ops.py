"""What a platform must provide to run a model, and the plain PyTorch version of each operator, which specifies the fast
ones.

Shape letters: T tokens (all entries of all rows, flattened), D model width, N query heads, K KV heads, H head size, I
MLP width.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.model.parameters import MoE, QKNorm, RMSNorm

Activation = Any  # a Tensor, or a platform's quantized activation on its way into a linear


class Ops(Protocol):
    """The stages of a decoder layer. `step` is the platform's own description of the rows being computed."""

    def norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, norm: RMSNorm, consumer: nn.Module | None
    ) -> tuple[Activation, Tensor]:
        """residual + x, and its RMS norm in the form that `consumer` (the next linear) reads."""

    def linear(self, x: Activation, linear: nn.Module) -> Tensor: ...

    def attend(self, qkv_TE: Tensor, layer: int, step: Any, qk_norm: QKNorm | None) -> Tensor:
        """Norm q and k by head where the family does, rotate them, pre-write k and v, attend: [T, (N + 2K) H] -> [T, N
        H]."""

    def mlp(self, x: Activation, gate_up: nn.Module, down: nn.Module) -> Tensor:
        """down(silu(gate(x)) * up(x)); a partial sum under tensor parallelism."""

    def moe(self, x_TD: Activation, moe: MoE) -> Tensor:
        """A mixture of experts in place of the MLP (common.model.moe); a partial sum under tensor parallelism."""

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        """Sum over the tensor-parallel ranks."""


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32."""
    x32_TD = x_TD.float()
    scale_T1 = torch.rsqrt(x32_TD.square().mean(dim=-1, keepdim=True) + eps)
    return (x32_TD * scale_T1 * weight_D.float()).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual rounded to x's dtype)."""
    summed_TD = x_TD if residual_TD is None else x_TD + residual_TD
    return rms_norm(summed_TD, weight_D, eps), summed_TD


def rotary_table(num_positions: int, rotary_size: int, theta: float, device: torch.device) -> Tensor:
    """cos and sin of every position's angles, float32 [positions, 2, F]; rotary_size 2F: dimensions of a head that are
    rotated."""
    frequency_F = theta ** (-torch.arange(0, rotary_size, 2, dtype=torch.float64, device="cpu") / rotary_size)
    angle_PF = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency_F
    return torch.stack((angle_PF.cos(), angle_PF.sin()), dim=1).float().to(device)


def rotate(x_TNH: Tensor, table_T2F: Tensor) -> Tensor:
    """Rotary embedding of a head's first 2F dimensions, half layout: i pairs with i + F. Computed in float32."""
    num_pairs = table_T2F.shape[-1]
    cos_T1F, sin_T1F = table_T2F[:, 0].unsqueeze(1), table_T2F[:, 1].unsqueeze(1)
    sizes = [num_pairs, num_pairs, x_TNH.shape[-1] - 2 * num_pairs]
    left, right, rest = torch.split(x_TNH.float(), sizes, dim=-1)
    rotated = torch.cat((left * cos_T1F - right * sin_T1F, right * cos_T1F + left * sin_T1F, rest), dim=-1)
    return rotated.to(x_TNH.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, is_visible: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * query @ key^T) @ value: [B, N, W, H] over [B, K, X, H]; is_visible broadcasts to [B, N, W, X].

    In half precision it rounds where the fused kernels of both platforms do: the weights exp(score - highest score)
    before they meet the values, and the result; the scale is a float32, as kernels take it. All else is in float64, so
    that the order of a sum, which follows from where a cache keeps its keys, shows in no bit. A query that sees nothing
    gives 0. float32, and a GPU, go through PyTorch's own kernels, where such a query is undefined.
    """
    if query.dtype == torch.float32 or query.is_cuda:
        enable_gqa = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=is_visible, scale=scale, enable_gqa=enable_gqa
        )
    num_rows, num_heads, width, head_size = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    # The heads of a KV head are more of its queries.
    query_BKQH = query.double().reshape(num_rows, num_kv_heads, -1, head_size)
    score_BNWX = (query_BKQH @ key.double().transpose(-1, -2)).view(num_rows, num_heads, width, num_keys)
    score_BNWX.mul_(float(np.float32(scale)))
    if is_visible is not None:
        score_BNWX.masked_fill_(~is_visible, -torch.inf)
    weight_BNWX = score_BNWX.sub_(score_BNWX.amax(dim=-1, keepdim=True).clamp(min=-1e300)).exp_()
    total_BNW1 = weight_BNWX.sum(dim=-1, keepdim=True).clamp(min=1e-300)
    rounded_BKQX = weight_BNWX.to(query.dtype).double().view(num_rows, num_kv_heads, -1, num_keys)
    attended_BNWH = (rounded_BKQX @ value.double()).view(query.shape).div_(total_BNW1)
    return attended_BNWH.to(query.dtype)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    """silu(first half) * second half, computed in float32."""
    gate, up = gate_up_TI.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up_TI.dtype)
