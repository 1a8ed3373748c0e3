"""The decoder stages in plain PyTorch operators, on CPU or CUDA: what the Triton kernels are checked against.

Shapes: T tokens, R rows of a run (adjacent rows that are alike), W entries of each, C cached positions looked
at, X keys of a row's window, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.checkpoint import ModelConfig
from common.model import (
    Activation,
    MoE,
    QKNorm,
    RMSNorm,
    add_rms_norm,
    attention,
    merge_statistics,
    mixture,
    rms_norm,
    rotary_table,
    rotate,
    route,
    sampled_statistics,
    shard_statistics,
    swiglu,
)
from common.runtime import Collectives, class_statistics, pages_for
from lopa_cuda.steps import PAGE_SIZE, DeviceStep, PagedKVCache, Run, StagedSlice


def visible_keys(horizon_RW: Tensor, run: Run) -> Tensor:
    """[R, 1, W, C + X], True where a query may look; the definition of attention over [cached | own window].

    Cached keys count before the row's window, and after it where the dual cache holds some; the X window keys count up
    to the query's horizon.
    """
    num_rows, width = horizon_RW.shape
    cached_C = torch.arange(run.cached, device=horizon_RW.device)
    window_X = torch.arange(run.num_keys, device=horizon_RW.device)
    sees_cached_C = (cached_C < run.start) | (cached_C >= run.start + run.num_keys)
    sees_window_RWX = run.start + window_X < horizon_RW[:, :, None]
    return torch.cat((sees_cached_C.expand(num_rows, width, -1), sees_window_RWX), dim=-1).unsqueeze(1)


def rotary_of(config: ModelConfig, cache: PagedKVCache) -> Tensor:
    """The rotary table as the published model has it: with values that the cache's dtype can hold, as float32.

    Most published models round cos and sin to their own dtype, and Ascend's operator takes them in no other; LLaDA
    does not.
    """
    table = rotary_table(cache.max_model_len, config.rotary_size, config.rope_theta, cache.committed.device)
    return table.to(cache.committed.dtype).float() if config.rounds_rotary else table


class VisibleRun(NamedTuple):
    """tokens: those of its rows. keys: tokens of the staging memory, row after row too, each row's window first."""

    run: Run
    tokens: slice
    keys: slice
    is_visible_R1WX: Tensor


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What every layer of a pass shares."""

    rotary_T2F: Tensor
    runs: list[VisibleRun]
    staged: StagedSlice


class TorchOps:
    """A layer's stages (`common.model.Ops`) over a PagedKVCache, whose pages are gathered for every run, and what else
    this engine's passes need; `lopa_cuda.ops.fused.FusedOps` has all of it too.

    tiling: of attention that takes the rows and their lengths from the device; None: it looks at step.runs, which are
    fixed when a pass is captured. noted_experts: while it is a list, every mixture of experts adds its choices, [T, C].
    """

    tiling = None
    noted_experts: list[Tensor] | None = None

    def __init__(self, config: ModelConfig, cache: PagedKVCache, collectives: Collectives) -> None:
        tp_size = collectives.mesh.tp_size
        self.head_size = config.head_size
        self.num_heads, self.num_kv_heads = config.num_heads // tp_size, config.kv_heads_of_rank(tp_size)
        self.cache = cache
        self.rotary = rotary_of(config, cache)
        self._tp_sum = collectives.tp_sum

    def adopt(self, model: nn.Module) -> None:
        """Take the model's linears, once they are final."""

    def plan(self, step: DeviceStep) -> PlainStep:
        """The step that `attend` gets; called once a pass, before the layers."""
        runs, first = [], 0
        for run in step.runs:
            tokens = slice(first, first + run.num_rows * run.num_entries)
            horizon_RW = step.horizon_T[tokens].view(run.num_rows, run.num_entries)
            keys = tokens if run.first_key is None else slice(run.first_key, run.first_key + run.num_keys)
            runs.append(VisibleRun(run, tokens, keys, visible_keys(horizon_RW, run)))
            first = tokens.stop
        return PlainStep(self.rotary[step.position_T], runs, step.staged)

    def norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, norm: RMSNorm, consumer: nn.Module | None
    ) -> tuple[Activation, Tensor]:
        return add_rms_norm(x_TD, residual_TD, norm.weight, norm.eps)

    def linear(self, x: Activation, linear: nn.Module) -> Tensor:
        return linear(x)

    def mlp(self, x: Activation, gate_up: nn.Module, down: nn.Module) -> Tensor:
        return down(swiglu(gate_up(x)))

    def moe(self, x_TD: Tensor, moe: MoE) -> Tensor:
        if self.noted_experts is not None:
            self.noted_experts.append(route(x_TD, moe).expert_TC)
        return mixture(x_TD, moe)

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        return self._tp_sum(x_TD)

    def copy_rows(self, parts: list[Tensor], to: list[Tensor], index_M: Tensor | None = None) -> None:
        """to[i] = parts[i], or parts[i][index], for all i."""
        for part, other in zip(parts, to, strict=True):
            other.copy_(part if index_M is None else part.index_select(0, index_M))

    def logits(self, hidden: Activation, head: nn.Module) -> Tensor:
        """Logits [M, V] of this rank's share of the vocabulary, from [M, D] as `head` reads it."""
        return self.linear(hidden, head)

    # [M, 6] for this rank's share of the vocabulary; [M, 3] for all shards; the same where some rows are drawn.
    statistics = staticmethod(shard_statistics)
    merge = staticmethod(merge_statistics)
    sampled = staticmethod(sampled_statistics)
    class_statistics = staticmethod(class_statistics)

    def attend(self, qkv_TE: Tensor, layer: int, plain: PlainStep, qk_norm: QKNorm | None) -> Tensor:
        qkv_TGH = qkv_TE.view(len(qkv_TE), -1, self.head_size)
        q_TNH, key_TKH, value_TKH = qkv_TGH.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if qk_norm is not None:
            q_TNH = rms_norm(q_TNH, qk_norm.q_weight, qk_norm.eps)
            key_TKH = rms_norm(key_TKH, qk_norm.k_weight, qk_norm.eps)
        q_TNH, key_TKH = rotate(q_TNH, plain.rotary_T2F), rotate(key_TKH, plain.rotary_T2F)
        window_2TKH = self.cache.staging[layer]
        own_2TKH = plain.staged.own(window_2TKH)
        own_2TKH[0], own_2TKH[1] = key_TKH, value_TKH
        plain.staged.gather(window_2TKH)
        attended = [self._attend_run(q_TNH, layer, *visible) for visible in plain.runs]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_run(
        self, q_TNH: Tensor, layer: int, run: Run, tokens: slice, keys: slice, is_visible_R1WX: Tensor
    ) -> Tensor:  # fmt: skip
        attended_RNWH = attention(
            q_TNH[tokens].unflatten(0, (run.num_rows, -1)).transpose(1, 2),
            self._with_cached(layer, 0, keys, run).transpose(1, 2),
            self._with_cached(layer, 1, keys, run).transpose(1, 2),
            is_visible_R1WX,
            self.head_size**-0.5,
        )
        return attended_RNWH.transpose(1, 2).flatten(0, 1).flatten(1)

    def _with_cached(self, layer: int, part: int, keys: slice, run: Run) -> Tensor:
        """The rows' cached keys (or values) followed by their own: [R, C + X, K, H]."""
        own_RXKH = self.cache.staging[layer, part, keys].unflatten(0, (run.num_rows, -1))[:, : run.num_keys]
        pages_P = self.cache.table_SP[run.slot, : pages_for(run.cached, PAGE_SIZE)]
        cached_CKH = self.cache.committed[layer, part].index_select(0, pages_P).flatten(0, 1)[: run.cached]
        return torch.cat((cached_CKH.expand(run.num_rows, -1, -1, -1), own_RXKH), dim=1)
