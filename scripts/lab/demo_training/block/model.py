"""The block-diffusion model. Module names are the tensor names of an SDAR checkpoint: Qwen3's, with experts
Qwen3-MoE's.

Shape letters: B rows, N heads, K KV heads, T positions of a pass, P positions before it, H head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from demo_training.model import MLP, Body, RMSNorm, init_weights, rotate, turns

from .recipe import BlockRecipe

KeyValue = tuple[torch.Tensor, torch.Tensor]  # [B, K, positions, H] each


class View(NamedTuple):
    """Where the tokens of a pass stand and what they see.

    `cos_TH` and `sin_TH` rotate by the positions. `mask` is True where a query may see a key, [T, T]; None: everything.
    """

    cos_TH: torch.Tensor
    sin_TH: torch.Tensor
    mask: torch.Tensor | BlockMask | None


def view_of(position_T: torch.Tensor, recipe: BlockRecipe, mask: torch.Tensor | BlockMask | None = None) -> View:
    return View(*turns(position_T, recipe.head_size, recipe.rope_theta), mask)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | BlockMask | None) -> torch.Tensor:
    """Query head j reads KV head j // (heads / KV heads)."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Attention(nn.Module):
    def __init__(self, recipe: BlockRecipe) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = recipe.heads, recipe.kv_heads, recipe.head_size
        width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        self.q_proj = nn.Linear(recipe.hidden, width, bias=False)
        self.k_proj = nn.Linear(recipe.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(recipe.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, recipe.hidden, bias=False)
        self.q_norm = RMSNorm(self.head_size, recipe.norm_eps)
        self.k_norm = RMSNorm(self.head_size, recipe.norm_eps)

    def forward(self, x: torch.Tensor, view: View, past: KeyValue | None) -> tuple[torch.Tensor, KeyValue]:
        """The output, and the pass's own keys and values."""
        rows, length, _ = x.shape
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_size).transpose(1, 2)
        q, k = (
            norm(project(x).view(rows, length, -1, self.head_size).transpose(1, 2).float())
            for project, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm))
        )
        q, k = (rotate(one, view.cos_TH, view.sin_TH).to(v.dtype) for one in (q, k))
        seen = (k, v) if past is None else (torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2))
        out = attend(q, *seen, view.mask)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1)), (k, v)


class Experts(nn.Module):
    """Mixture of experts, each token's most probable ones. All experts compute all tokens, which at this size takes
    less than sorting them."""

    def __init__(self, recipe: BlockRecipe) -> None:
        super().__init__()
        self.num_active = recipe.active_experts
        self.gate = nn.Linear(recipe.hidden, recipe.experts, bias=False)
        narrow = replace(recipe, intermediate=recipe.expert_width)
        self.experts = nn.ModuleList(MLP(narrow) for _ in range(recipe.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).float().softmax(dim=-1)
        kept, place = share.topk(self.num_active, dim=-1)
        weight = torch.zeros_like(share).scatter(-1, place, kept / kept.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + weight[..., number, None] * expert(x)
        return out


class Layer(nn.Module):
    def __init__(self, recipe: BlockRecipe) -> None:
        super().__init__()
        self.self_attn = Attention(recipe)
        self.mlp = Experts(recipe) if recipe.experts else MLP(recipe)
        self.input_layernorm = RMSNorm(recipe.hidden, recipe.norm_eps)
        self.post_attention_layernorm = RMSNorm(recipe.hidden, recipe.norm_eps)

    def forward(self, x: torch.Tensor, view: View, past: KeyValue | None) -> tuple[torch.Tensor, KeyValue]:
        out, own = self.self_attn(self.input_layernorm(x), view, past)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), own


class BlockDiffusion(nn.Module):
    """Row p of the logits predicts position p: there is no shift."""

    def __init__(self, recipe: BlockRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = Body(recipe, Layer)
        self.lm_head = nn.Linear(recipe.hidden, recipe.vocabulary, bias=False)
        init_weights(self, recipe.layers)

    def hidden(
        self, tokens_BT: torch.Tensor, view: View, past: list[KeyValue] | None = None
    ) -> tuple[torch.Tensor, list[KeyValue]]:
        """[B, T, width] in front of the head, and each layer's keys and values of these T positions.

        `past` has those of the positions before, which every query sees; `view.mask` is None then.
        """
        x = self.model.embed_tokens(tokens_BT)
        own: list[KeyValue] = []
        for i, layer in enumerate(self.model.layers):
            x, key_value = layer(x, view, None if past is None else past[i])
            own.append(key_value)
        return self.model.norm(x), own

    def forward(self, tokens_BT: torch.Tensor, view: View) -> torch.Tensor:
        """Logits [B, T, V]."""
        return self.lm_head(self.hidden(tokens_BT, view)[0])
