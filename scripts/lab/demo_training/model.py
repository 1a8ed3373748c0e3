"""The model in training. Module names are the tensor names of a Dream checkpoint.

Shape letters: B samples, N heads, S positions, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from .recipe import Recipe


class Visibility(NamedTuple):
    block_BS: torch.Tensor
    horizon_BS: torch.Tensor
    bias_B1SS: torch.Tensor | None  # None: flex attention applies the rule itself
    cos_SH: torch.Tensor
    sin_SH: torch.Tensor


def turns(position_S: torch.Tensor, head_size: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine by which `rotate` turns heads at these positions, [S, H] each."""
    exponent = torch.arange(0, head_size, 2, device=position_S.device).float() / head_size
    angle_SH = torch.outer(position_S.float(), theta**-exponent).repeat(1, 2)
    return angle_SH.cos(), angle_SH.sin()


def rotate(x_BNSH: torch.Tensor, cos_SH: torch.Tensor, sin_SH: torch.Tensor) -> torch.Tensor:
    first, second = x_BNSH.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x_BNSH * cos_SH + rotated * sin_SH).to(x_BNSH.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = recipe.heads, recipe.kv_heads, recipe.hidden // recipe.heads
        kv_width = self.kv_heads * self.head_size
        self.q_proj = nn.Linear(recipe.hidden, recipe.hidden)
        self.k_proj = nn.Linear(recipe.hidden, kv_width)
        self.v_proj = nn.Linear(recipe.hidden, kv_width)
        self.o_proj = nn.Linear(recipe.hidden, recipe.hidden, bias=False)

    def forward(self, x: torch.Tensor, see: Visibility) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k = (
            rotate(project(x).view(rows, length, -1, self.head_size).transpose(1, 2), see.cos_SH, see.sin_SH)
            for project in (self.q_proj, self.k_proj)
        )
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_size).transpose(1, 2)
        if see.bias_B1SS is None:
            out = flex_attention(q, k, v, score_mod=hide_beyond(see), enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=see.bias_B1SS.to(q.dtype))
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def hide_beyond(see: Visibility) -> Callable[..., torch.Tensor]:
    block_BS, horizon_BS = see.block_BS, see.horizon_BS

    def score_mod(logit: torch.Tensor, b: Any, _head: Any, q: Any, kv: Any) -> torch.Tensor:
        return torch.where(block_BS[b, kv] <= horizon_BS[b, q], logit, -float("inf"))

    return score_mod


class MLP(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(recipe.hidden, recipe.intermediate, bias=False)
        self.up_proj = nn.Linear(recipe.hidden, recipe.intermediate, bias=False)
        self.down_proj = nn.Linear(recipe.intermediate, recipe.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.self_attn = Attention(recipe)
        self.mlp = MLP(recipe)
        self.input_layernorm = RMSNorm(recipe.hidden, recipe.norm_eps)
        self.post_attention_layernorm = RMSNorm(recipe.hidden, recipe.norm_eps)

    def forward(self, x: torch.Tensor, see: Visibility) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), see)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, recipe: Recipe, layer: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(recipe.vocabulary, recipe.hidden)
        self.layers = nn.ModuleList(layer(recipe) for _ in range(recipe.layers))
        self.norm = RMSNorm(recipe.hidden, recipe.norm_eps)


def init_weights(model: nn.Module, layers: int) -> None:
    """Normal matrices, narrower where a layer adds to the residual stream; biases are zero."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_output else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class Dream(nn.Module):
    """Row i of the logits predicts position i+1, as Dream's does."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = Body(recipe, Layer)
        self.lm_head = nn.Linear(recipe.hidden, recipe.vocabulary, bias=False)
        init_weights(self, recipe.layers)

    def visibility(self, block_BS: torch.Tensor, horizon_BS: torch.Tensor, is_flex: bool) -> Visibility:
        position_S = torch.arange(block_BS.shape[1], device=block_BS.device)
        bias = None
        if not is_flex:
            is_visible = block_BS[:, None, None, :] <= horizon_BS[:, None, :, None]
            bias = torch.zeros(is_visible.shape, device=block_BS.device).masked_fill(~is_visible, -float("inf"))
            bias = bias.to(torch.bfloat16 if block_BS.is_cuda else torch.float32)
        head_size = self.recipe.hidden // self.recipe.heads
        return Visibility(block_BS, horizon_BS, bias, *turns(position_S, head_size, self.recipe.rope_theta))

    def forward(
        self, tokens_BS: torch.Tensor, block_BS: torch.Tensor, horizon_BS: torch.Tensor, is_flex: bool = False
    ) -> torch.Tensor:
        see = self.visibility(block_BS, horizon_BS, is_flex)
        x = self.model.embed_tokens(tokens_BS)
        for layer in self.model.layers:
            x = layer(x, see)
        return self.lm_head(self.model.norm(x))
