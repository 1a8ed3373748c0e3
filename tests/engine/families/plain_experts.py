"""SDAR over Qwen3-MoE written from its published layout: every pass computes all positions anew, expert by expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

CONFIG: dict[str, Any] = {
    "model_type": "sdar_moe", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 128,
    "mask_token_id": 95, "eos_token_id": 94, "block_size": 4, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """A folder of made-up weights under their published names; returns them in float64."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(*shape, generator=generator) * 0.25 for name, shape in _shapes().items()}
    weights |= {name: 1 + weight for name, weight in weights.items() if name.endswith("norm.weight")}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return {name: weight.double() for name, weight in weights.items()}


def _shapes() -> dict[str, tuple[int, ...]]:
    width, inner, head = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["head_dim"]
    all_heads, kv_heads = (CONFIG[key] * head for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (CONFIG["vocab_size"], width))
    shapes["model.norm.weight"] = (width,)
    for layer in range(CONFIG["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "mlp.gate": (CONFIG["num_experts"], width),
            "self_attn.q_proj": (all_heads, width), "self_attn.k_proj": (kv_heads, width),
            "self_attn.v_proj": (kv_heads, width), "self_attn.o_proj": (width, all_heads),
            "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
        }  # fmt: skip
        for expert in range(CONFIG["num_experts"]):
            own = f"mlp.experts.{expert}."
            of_layer |= {own + "gate_proj": (inner, width), own + "up_proj": (inner, width)}
            of_layer[own + "down_proj"] = (width, inner)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def plain_logits(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """[S, V] in float64: a position sees everything up to the end of its block."""
    block_S = torch.arange(len(tokens)) // CONFIG["block_size"]
    sees_SS = block_S[:, None] >= block_S
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(CONFIG["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        at = {name.removeprefix(own): weight for name, weight in weights.items() if name.startswith(own)}
        x = x + _attend(_norm(x, at["input_layernorm.weight"]), at, sees_SS)
        h = _norm(x, at["post_attention_layernorm.weight"])
        x = x + torch.stack([_experts(token, at) for token in h])
    logits = _norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    logits[:, CONFIG["mask_token_id"]] = -torch.inf
    return logits


def _experts(x: Tensor, at: dict[str, Tensor]) -> Tensor:
    """Mix the experts of one token: the best by softmax over all, with weights that sum to 1."""
    chance, chosen = (at["mlp.gate.weight"] @ x).softmax(0).topk(CONFIG["num_experts_per_tok"])
    total = torch.zeros_like(x)
    for share, expert in zip(chance / chance.sum(), chosen.tolist(), strict=True):
        gate, up, down = (at[f"mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        total += share * (down @ (silu(gate @ x) * (up @ x)))
    return total


def _attend(h: Tensor, at: dict[str, Tensor], sees_SS: Tensor) -> Tensor:
    q, k, v = (
        (h @ at[f"self_attn.{name}_proj.weight"].T).view(len(h), -1, CONFIG["head_dim"]).transpose(0, 1)
        for name in ("q", "k", "v")
    )
    q, k = _rotate(_norm(q, at["self_attn.q_norm.weight"])), _rotate(_norm(k, at["self_attn.k_norm.weight"]))
    k, v = (part.repeat_interleave(len(q) // len(k), dim=0) for part in (k, v))
    scores = (q @ k.transpose(1, 2) / CONFIG["head_dim"] ** 0.5).masked_fill(~sees_SS, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ at["self_attn.o_proj.weight"].T


def _rotate(x: Tensor) -> Tensor:
    """[heads, S, head]: the first half of a head with the second, as Llama does."""
    half = CONFIG["head_dim"] // 2
    rate = CONFIG["rope_theta"] ** (-torch.arange(half).double() / half)
    angle = torch.arange(x.shape[1])[:, None] * rate
    first, second = x[..., :half], x[..., half:]
    turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat(turned, dim=-1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def plain_decode(weights: dict[str, Tensor], prompt: list[int], length: int, threshold: float) -> list[int]:
    """Fill `length` tokens after the prompt: in a block all masks above the threshold, or else the most probable."""
    size, mask = CONFIG["block_size"], CONFIG["mask_token_id"]
    tokens = list(prompt)
    while len(tokens) < len(prompt) + length:
        tokens += [mask] * (size - len(tokens) % size)
        while mask in tokens:
            best = plain_logits(weights, tokens)[-size:].softmax(-1).max(-1)
            chance = {place: best.values[place].item() for place in range(size) if tokens[place - size] == mask}
            sure = [place for place, value in chance.items() if value > threshold]
            for place in sure or [max(chance, key=lambda place: chance[place])]:
                tokens[place - size] = int(best.indices[place])
    return tokens[len(prompt) : len(prompt) + length]
