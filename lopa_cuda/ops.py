"""The decoder stages in plain PyTorch operators, on CPU or CUDA: what the Triton kernels are checked against.

Shapes: R rows of this rank, W window entries, C cached positions looked at, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models.config import ModelConfig
from common.models.ops import Activation, RMSNorm, add_rms_norm, rotary_table, rotate, swiglu
from lopa_cuda.kv_cache import StaticKVCache
from lopa_cuda.parallel import Collectives


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """This rank's rows of a StepPlan on the device. `slot`: the one slot of all rows, or None where they differ."""

    position_RW: Tensor
    slot_R: Tensor
    slot: int | None
    num_cached: int
    is_visible_R1WX: Tensor  # over the C cached keys, then the W window keys


def visible_keys(horizon_RW: Tensor, start_R: Tensor, num_keys_R: Tensor, cached_R: Tensor, num_cached: int) -> Tensor:
    """[R, 1, W, C + W], True where a query may look; the definition of attention over [cached | own window].

    Cached keys count before the row's window, and behind it where the dual cache holds some; window keys count up to the
    query's horizon.
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


class TorchOps:
    """common.models.ops.Ops over a StaticKVCache."""

    def __init__(self, config: ModelConfig, cache: StaticKVCache, collectives: Collectives, max_model_len: int) -> None:
        tp_size = collectives.mesh.tp_size
        self.head_size = config.head_size
        self.num_heads, self.num_kv_heads = config.num_heads // tp_size, config.num_kv_heads // tp_size
        self.cache = cache
        self.rotary = rotary_table(max_model_len, config.head_size, config.rope_theta, cache.committed.device)
        self._tp_sum = collectives.tp_sum

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

    def attend(self, qkv_TE: Tensor, layer: int, step: DeviceStep) -> Tensor:
        num_rows, width = step.position_RW.shape
        qkv_TGH = qkv_TE.view(num_rows * width, -1, self.head_size)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated_TGH = rotate(qkv_TGH[:, :num_rotated], self.rotary[step.position_RW.flatten()])
        q_RWNH = rotated_TGH[:, : self.num_heads].view(num_rows, width, self.num_heads, self.head_size)
        key_RWKH = rotated_TGH[:, self.num_heads :].view(num_rows, width, self.num_kv_heads, self.head_size)
        value_RWKH = qkv_TGH[:, num_rotated:].view(num_rows, width, self.num_kv_heads, self.head_size)
        self.cache.prewrite(layer, key_RWKH, value_RWKH)
        key_RXKH, value_RXKH = (
            self._with_cached(layer, 0, key_RWKH, step),
            self._with_cached(layer, 1, value_RWKH, step),
        )
        attended_RNWH = functional.scaled_dot_product_attention(
            q_RWNH.transpose(1, 2),
            key_RXKH.transpose(1, 2),
            value_RXKH.transpose(1, 2),
            attn_mask=step.is_visible_R1WX,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return attended_RNWH.transpose(1, 2).reshape(num_rows * width, -1)

    def _with_cached(self, layer: int, part: int, own_RWKH: Tensor, step: DeviceStep) -> Tensor:
        """The row's cached keys (or values) followed by its own: [R, C + W, K, H]."""
        committed = self.cache.committed[layer, part]
        if step.slot is not None:
            cached = committed[step.slot, : step.num_cached].expand(own_RWKH.shape[0], -1, -1, -1)
        else:
            cached = committed[step.slot_R, : step.num_cached]
        return torch.cat((cached, own_RWKH), dim=1)
