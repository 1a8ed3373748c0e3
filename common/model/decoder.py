"""The decoder of every family, without a causal mask. The platform's operators are injected.

What differs between families is data of `ModelConfig`: biases, norms of query and key heads, mixtures of experts.
Parameter names are those of common.checkpoint.rules: q, k, v merged into qkv_proj, gate and up into gate_up_proj, both
already cut to this tensor-parallel rank's share.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.checkpoint import ModelConfig, shard_bounds
from common.errors import ConfigError
from common.model.ops import Activation, Ops
from common.model.parameters import Linear, MoE, QKNorm, RMSNorm


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.index = index
        num_heads, num_kv_heads = config.num_heads // tp_size, config.kv_heads_of_rank(tp_size)
        head_size, width, inner = config.head_size, config.hidden_size, config.intermediate_size // tp_size
        self.input_norm = RMSNorm(width, config.rms_norm_eps)
        self.qkv_proj = Linear(width, (num_heads + 2 * num_kv_heads) * head_size, has_bias=config.attention_bias)
        self.qk_norm = QKNorm(head_size, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = Linear(num_heads * head_size, width)
        self.post_attention_norm = RMSNorm(width, config.rms_norm_eps)
        is_moe = config.moe is not None and config.is_moe_layer(index)
        self.moe = MoE(config.moe, width, tp_rank, tp_size) if config.moe is not None and is_moe else None
        if self.moe is None:
            self.gate_up_proj = Linear(width, 2 * inner)
            self.down_proj = Linear(inner, width)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, ops: Ops, step: Any) -> tuple[Tensor, Tensor]:
        return self.feed_forward(*self.attend(x_TD, residual_TD, ops, step), ops)

    def attend(self, x_TD: Tensor, residual_TD: Tensor | None, ops: Ops, step: Any) -> tuple[Activation, Tensor]:
        """Compute what `feed_forward` takes: attention's values [T, N H], and the residual stream [T, D] without
        them."""
        h, residual_TD = ops.norm(x_TD, residual_TD, self.input_norm, self.qkv_proj)
        return ops.attend(ops.linear(h, self.qkv_proj), self.index, step, self.qk_norm), residual_TD

    def feed_forward(self, attended: Activation, residual_TD: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """Compute the rest of the layer, in which no token looks at another."""
        x_TD = ops.all_reduce(ops.linear(attended, self.o_proj))
        if self.moe is not None:
            h, residual_TD = ops.norm(x_TD, residual_TD, self.post_attention_norm, None)
            return ops.all_reduce(ops.moe(h, self.moe)), residual_TD
        h, residual_TD = ops.norm(x_TD, residual_TD, self.post_attention_norm, self.gate_up_proj)
        return ops.all_reduce(ops.mlp(h, self.gate_up_proj, self.down_proj)), residual_TD


class Decoder(nn.Module):
    """Token ids in, normalised hidden states out; the head is applied by the engine, where and how it needs it."""

    def __init__(self, config: ModelConfig, ops: Ops, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        self.ops = ops
        # Not drawn at random: on the meta device that would import all of torch._dynamo, for seconds of a start.
        shape = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(*shape, _weight=torch.empty(shape))
        self.layers = nn.ModuleList(DecoderLayer(config, n, tp_rank, tp_size) for n in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.vocab_start, vocab_end = shard_bounds(config.vocab_size, tp_rank, tp_size)
        self.lm_head = Linear(config.hidden_size, vocab_end - self.vocab_start)

    def forward(self, token_T: Tensor, step: Any) -> Tensor:
        """Compute [T] ids -> [T, D] hidden states after the last norm."""
        hidden_TD = self.finish(*self.until_last_attention(token_T, step))
        assert isinstance(hidden_TD, Tensor), "nothing quantized was asked for"
        return hidden_TD

    def until_last_attention(self, token_T: Tensor, step: Any) -> tuple[Activation, Tensor]:
        """Compute all that other tokens and later passes look at, every layer's keys and values included. The result is
        what `finish` takes, of all tokens or of some."""
        x_TD, residual_TD = functional.embedding(token_T, self.embed_tokens.weight), None
        *layers, last = cast("list[DecoderLayer]", list(self.layers))
        for layer in layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, self.ops, step)
        return last.attend(x_TD, residual_TD, self.ops, step)

    def finish(self, attended: Activation, residual_TD: Tensor, consumer: nn.Module | None = None) -> Activation:
        """Compute the rest of the last layer after its attention, and the last norm: [T, D] hidden states, in the form
        that `consumer` reads."""
        last = cast(DecoderLayer, self.layers[-1])
        x_TD, residual_TD = last.feed_forward(attended, residual_TD, self.ops)
        hidden, _ = self.ops.norm(x_TD, residual_TD, self.norm, consumer)
        return hidden


def build_decoder(
    config: ModelConfig, ops: Ops, weights: dict[str, Tensor], *, tp_rank: int, tp_size: int, device: torch.device,
    without: Collection[str] = (),
) -> Decoder:  # fmt: skip
    """Build a decoder on `device` with the given weights, which are moved one by one and dropped from the dict.

    without: parameters of modules that the caller replaces; they hold nothing.
    """
    with torch.device("meta"):
        model = Decoder(config, ops, tp_rank=tp_rank, tp_size=tp_size)
    for name, parameter in list(model.named_parameters()):
        if name in without:
            continue
        parent, _, leaf = name.rpartition(".")
        weight = weights.pop(name)
        if weight.shape != parameter.shape:
            raise ConfigError(f"{name}: shape {tuple(weight.shape)}, the model needs {tuple(parameter.shape)}")
        module = model.get_submodule(parent)
        setattr(module, leaf, nn.Parameter(weight.to(device), requires_grad=False))
    return model.eval()
