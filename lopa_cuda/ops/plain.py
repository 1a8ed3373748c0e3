"""The decoder stages in plain PyTorch operators, on CPU or CUDA: what the Triton kernels are checked against.

Shapes: R rows of this rank, W window entries, T = R * W tokens, C cached positions looked at, N query heads, K KV
heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.checkpoint import ModelConfig
from common.decoding import Sampling
from common.model import (
    Activation,
    Ops,
    RMSNorm,
    add_rms_norm,
    attention,
    merge_statistics,
    rotary_table,
    rotate,
    shard_statistics,
    swiglu,
)
from lopa_cuda.parallel import Collectives
from lopa_cuda.steps import DeviceStep, StaticKVCache


def visible_keys(horizon_RW: Tensor, start_R: Tensor, num_keys_R: Tensor, cached_R: Tensor, num_cached: int) -> Tensor:
    """[R, 1, W, C + W], True where a query may look; the definition of attention over [cached | own window].

    Cached keys count before the row's window, and behind it where the dual cache holds some; window keys count up to
    the query's horizon.
    """
    width = horizon_RW.shape[1]
    cached_C = torch.arange(num_cached, device=horizon_RW.device)
    window_W = torch.arange(width, device=horizon_RW.device)
    end_R = start_R + num_keys_R
    is_before_RC = cached_C < start_R[:, None]
    is_behind_RC = (cached_C >= end_R[:, None]) & (cached_C < cached_R[:, None])
    sees_cached_RWC = (is_before_RC | is_behind_RC)[:, None, :].expand(-1, width, -1)
    is_key_RW = window_W < num_keys_R[:, None]
    key_position_RW = start_R[:, None] + window_W
    sees_window_RWW = is_key_RW[:, None, :] & (key_position_RW[:, None, :] < horizon_RW[:, :, None])
    return torch.cat((sees_cached_RWC, sees_window_RWW), dim=-1).unsqueeze(1)


def rotary_of(config: ModelConfig, cache: StaticKVCache) -> Tensor:
    """The rotary table with the values that the cache's dtype can hold, as float32.

    The published model rounds cos and sin to its own dtype, and Ascend's operator takes them in no other.
    """
    table = rotary_table(cache.max_model_len, config.head_size, config.rope_theta, cache.committed.device)
    return table.to(cache.committed.dtype).float()


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What every layer of a pass shares."""

    step: DeviceStep
    rotary_T2F: Tensor
    is_visible_R1WX: Tensor


class CudaOps(Ops, Protocol):
    """What this engine's passes need beside the layers' stages.

    reads_device_lengths: attention takes the cached lengths from the device; without it, it looks at step.num_cached
    keys, a number that is fixed when a pass is captured.
    """

    reads_device_lengths: bool

    def adopt(self, model: nn.Module) -> None:
        """Called once, when the model's linears are final."""

    def plan(self, step: DeviceStep) -> Any:
        """What `attend` gets as its step; called once a pass, before the layers."""

    def logits(self, hidden_MD: Tensor, head: nn.Module) -> Tensor:
        """[M, V] of this rank's share of the vocabulary."""

    def statistics(self, hidden_MD: Tensor, head: nn.Module, vocab_start: int, sampling: Sampling) -> Tensor:
        """[M, 6] of this rank's share of the vocabulary; see common.model.sampling."""

    def merge(self, statistics_PM6: Tensor, strategy: str) -> Tensor:
        """[M, 3]: token, probability, confidence."""


class TorchOps:
    """CudaOps over a StaticKVCache."""

    reads_device_lengths = False

    def __init__(self, config: ModelConfig, cache: StaticKVCache, collectives: Collectives) -> None:
        tp_size = collectives.mesh.tp_size
        self.head_size = config.head_size
        self.num_heads, self.num_kv_heads = config.num_heads // tp_size, config.num_kv_heads // tp_size
        self.cache = cache
        self.rotary = rotary_of(config, cache)
        self._tp_sum = collectives.tp_sum

    def adopt(self, model: nn.Module) -> None:
        pass

    def plan(self, step: DeviceStep) -> PlainStep:
        is_visible_R1WX = visible_keys(step.horizon_RW, step.start_R, step.num_keys_R, step.cached_R, step.num_cached)
        return PlainStep(step, self.rotary[step.position_RW.flatten()], is_visible_R1WX)

    def norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, norm: RMSNorm, consumer: nn.Module | None
    ) -> tuple[Activation, Tensor]:
        return add_rms_norm(x_TD, residual_TD, norm.weight, norm.eps)

    def linear(self, x: Activation, linear: nn.Module) -> Tensor:
        return linear(x)

    def mlp(self, x: Activation, gate_up: nn.Module, down: nn.Module) -> Tensor:
        return down(swiglu(gate_up(x)))

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        return self._tp_sum(x_TD)

    def logits(self, hidden_MD: Tensor, head: nn.Module) -> Tensor:
        return self.linear(hidden_MD, head)

    def statistics(self, hidden_MD: Tensor, head: nn.Module, vocab_start: int, sampling: Sampling) -> Tensor:
        return shard_statistics(self.logits(hidden_MD, head), vocab_start, sampling)

    def merge(self, statistics_PM6: Tensor, strategy: str) -> Tensor:
        return merge_statistics(statistics_PM6, strategy)

    def attend(self, qkv_TE: Tensor, layer: int, plain: PlainStep) -> Tensor:
        num_rows, width = plain.step.position_RW.shape
        num_tokens, num_rotated = num_rows * width, self.num_heads + self.num_kv_heads
        qkv_TGH = qkv_TE.view(num_tokens, -1, self.head_size)
        rotated_TGH = rotate(qkv_TGH[:, :num_rotated], plain.rotary_T2F)
        q_RWNH = rotated_TGH[:, : self.num_heads].reshape(num_rows, width, self.num_heads, self.head_size)
        key_TKH, value_TKH = rotated_TGH[:, self.num_heads :], qkv_TGH[:, num_rotated:]
        self.cache.prewrite(layer, key_TKH, value_TKH)
        attended_RNWH = attention(
            q_RWNH.transpose(1, 2),
            self._with_cached(layer, 0, key_TKH, plain.step).transpose(1, 2),
            self._with_cached(layer, 1, value_TKH, plain.step).transpose(1, 2),
            plain.is_visible_R1WX,
            self.head_size**-0.5,
        )
        return attended_RNWH.transpose(1, 2).reshape(num_tokens, -1)

    def _with_cached(self, layer: int, part: int, own_TKH: Tensor, step: DeviceStep) -> Tensor:
        """The row's cached keys (or values) followed by its own: [R, C + W, K, H]."""
        own_RWKH = own_TKH.reshape(*step.position_RW.shape, self.num_kv_heads, self.head_size)
        committed = self.cache.committed[layer, part, :, : step.num_cached]
        cached = committed[:1].expand(own_RWKH.shape[0], -1, -1, -1) if step.has_one_slot else committed[step.slot_R]
        return torch.cat((cached, own_RWKH), dim=1)
