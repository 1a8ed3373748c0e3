"""What a decoder layer holds: weights, which the platform's operators compute with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.checkpoint import MoEConfig, shard_bounds


class RMSNorm(nn.Module):
    """Holds the weight; the platform's `Ops.norm` computes."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps


class QKNorm(nn.Module):
    """Weights [H] of the RMS norms over each query head and each key head; the platform's `Ops.attend` computes."""

    def __init__(self, head_size: int, eps: float) -> None:
        super().__init__()
        self.q_weight = nn.Parameter(torch.ones(head_size), requires_grad=False)
        self.k_weight = nn.Parameter(torch.ones(head_size), requires_grad=False)
        self.eps = eps


class Linear(nn.Module):
    """Holds weight [out, in] and bias [out]; the platform's `Ops.linear` computes."""

    def __init__(self, num_in: int, num_out: int, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class MoE(nn.Module):
    """Holds the weights; the platform's `Ops.moe` computes. router [E, D] and expert_bias [E] are float32;
    experts_gate_up [Er, 2X, D] and experts_down [Er, D, X] are this rank's Er experts from `first_expert` on; in 8
    bits each has a scale an output channel (quant.experts)."""

    experts_gate_up_scale: torch.Tensor | None
    experts_down_scale: torch.Tensor | None

    def __init__(self, config: MoEConfig, width: int, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.config = config
        self.first_expert, end = shard_bounds(config.num_experts, tp_rank, tp_size)
        num_experts, inner = end - self.first_expert, config.intermediate_size
        self.router = _weights(config.num_experts, width, dtype=torch.float32)
        self.expert_bias = _weights(config.num_experts, dtype=torch.float32) if config.has_expert_bias else None
        self.experts_gate_up = _weights(num_experts, 2 * inner, width)
        self.experts_down = _weights(num_experts, width, inner)
        self.register_buffer("experts_gate_up_scale", None)
        self.register_buffer("experts_down_scale", None)
        shared = inner * config.num_shared_experts // tp_size
        self.shared_gate_up_proj = Linear(width, 2 * shared) if shared else None
        self.shared_down_proj = Linear(shared, width) if shared else None


def _weights(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
