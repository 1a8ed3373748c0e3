"""One W8A8 decoder layer on the ops facade in the engine's order of operations, and the same layer in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import plain
import torch
import torch.distributed as dist
from branches import HEAD_SIZE, PAGE, SCALE, Layout, hidden
from torch import Tensor

from lopa_ascend.ops import Ops

EPSILON = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Sizes of one tensor-parallel rank."""

    width: int
    num_heads: int
    num_kv_heads: int
    intermediate: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """[K, N] of each weight."""
        return {
            "qkv": (self.width, (self.num_heads + 2 * self.num_kv_heads) * HEAD_SIZE),
            "o": (self.num_heads * HEAD_SIZE, self.width),
            "gate_up": (self.width, 2 * self.intermediate),
            "down": (self.intermediate, self.width),
        }


DREAM_7B_TP4 = Sizes(width=3584, num_heads=7, num_kv_heads=1, intermediate=4736)
TINY = Sizes(width=256, num_heads=4, num_kv_heads=2, intermediate=256)


@dataclass(frozen=True)
class Weights:
    values: dict[str, Tensor]  # int8 [K, N]
    scales: dict[str, Tensor]  # float32 [N]
    qkv_bias: Tensor
    gammas: tuple[Tensor, Tensor]

    def to(self, device: str) -> Weights:
        return replace(
            self,
            values={name: tensor.to(device) for name, tensor in self.values.items()},
            scales={name: tensor.to(device) for name, tensor in self.scales.items()},
            qkv_bias=self.qkv_bias.to(device),
            gammas=(self.gammas[0].to(device), self.gammas[1].to(device)),
        )

    def in_nz(self, ops: Ops) -> Weights:
        return replace(self, values={name: ops.to_nz(tensor) for name, tensor in self.values.items()})


@dataclass(frozen=True)
class Inputs:
    """Inputs of one layer in one step."""

    x: Tensor
    residual: Tensor
    cos: Tensor
    sin: Tensor
    key_cache: Tensor
    value_cache: Tensor

    def to(self, device: str) -> Inputs:
        return Inputs(**{name: tensor.to(device) for name, tensor in self.__dict__.items()})


def draw_weights(sizes: Sizes, seed: int = 7) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    shapes = sizes.linears
    return Weights(
        {name: torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8) for name, shape in shapes.items()},
        {name: (torch.rand(n, generator=draw) + 0.5) * 1e-2 / k**0.5 for name, (k, n) in shapes.items()},
        torch.randn(shapes["qkv"][1], generator=draw).bfloat16(),
        tuple(torch.rand(sizes.width, generator=draw).bfloat16() + 0.5 for _ in range(2)),
    )


def draw_inputs(sizes: Sizes, layout: Layout, seed: int = 11) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    num_tokens = len(layout.position_T)
    cos, sin = (torch.cat([turn, turn], -1)[:, None].bfloat16() for turn in _turns(layout.position_T))
    x, residual = (torch.randn(num_tokens, sizes.width, generator=draw).bfloat16() for _ in range(2))
    shape = layout.num_pages, PAGE, sizes.num_kv_heads, HEAD_SIZE
    caches = [torch.randn(shape, generator=draw).bfloat16() for _ in "kv"]
    return Inputs(x, residual, cos, sin, *caches)


def run_layer(
    ops: Ops, sizes: Sizes, weights: Weights, inputs: Inputs, layout: Layout, tp_group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """(output, residual) of every token."""

    def project(name: str, values: Tensor, scale_T: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scale = weights.values[name], weights.scales[name]
        return ops.quant_matmul(values, weight, scale, scale_T=scale_T, bias_N=bias)

    def reduced(partial: Tensor) -> Tensor:
        if tp_group is not None:
            dist.all_reduce(partial, group=tp_group)
        return partial

    normed = ops.add_rms_norm_dynamic_quant(inputs.x, inputs.residual, weights.gammas[0], EPSILON)
    qkv = project("qkv", *normed.hidden, bias=weights.qkv_bias)
    query, key, value = ops.split_and_rotate(qkv, inputs.cos, inputs.sin, sizes.num_heads)
    ops.write_kv(key, value, inputs.key_cache, inputs.value_cache, layout.slot_T)
    attended = ops.paged_attention(query, inputs.key_cache, inputs.value_cache, layout.rows, SCALE)
    x = reduced(project("o", *ops.dynamic_quant(attended.view(len(attended), -1))))
    normed = ops.add_rms_norm_dynamic_quant(x, normed.residual, weights.gammas[1], EPSILON)
    gate_up = ops.quant_matmul_int32(normed.hidden.values, weights.values["gate_up"], weights.scales["gate_up"])
    ops.prefetch(weights.values["down"], gate_up, weights.values["down"].numel())
    gated = ops.dequant_swiglu_quant(gate_up, weights.scales["gate_up"][None], normed.hidden.scale_T)
    return reduced(project("down", *gated)), normed.residual


def run_layer_in_float64(sizes: Sizes, weights: Weights, inputs: Inputs, layout: Layout) -> tuple[Tensor, Tensor]:
    """Dense attention under a mask, dequantized weights; only the activations are quantized, as they must be."""

    def project(name: str, x: Tensor) -> Tensor:
        values, scale = plain.quantize(x)
        return values @ weights.values[name].double() * weights.scales[name].double() * scale[:, None]

    total = inputs.x.double() + inputs.residual.double()
    qkv = project("qkv", plain.rms_norm(total, weights.gammas[0], EPSILON)) + weights.qkv_bias.double()
    heads = qkv.view(len(qkv), -1, HEAD_SIZE)
    query, key, value = heads.split([sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], 1)
    angle = _angles(layout.position_T)
    query, key = plain.rotate(query, angle), plain.rotate(key, angle)
    total = total + project("o", _dense_attention(query, key, value, inputs, layout).flatten(1))
    gate, up = project("gate_up", plain.rms_norm(total, weights.gammas[1], EPSILON)).chunk(2, 1)
    return project("down", plain.swiglu(gate, up)), total


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, layout: Layout) -> Tensor:
    attended = []
    parts = zip(layout.branches, *(layout.per_branch(part) for part in (query, key, value)), strict=True)
    for branch, queries, *new in parts:
        provides = torch.tensor(branch.entries()[2])
        position = torch.arange(branch.num_cached)
        page = torch.tensor(branch.pages)[position // PAGE]
        old = [cache[page, position % PAGE].double() for cache in (inputs.key_cache, inputs.value_cache)]
        whole = [torch.cat((cached, part[provides])) for cached, part in zip(old, new, strict=True)]
        attended.append(plain.attention(queries, *whole, hidden(branch), SCALE))
    return torch.cat(attended)[layout.order_T]


def _turns(position: Tensor) -> tuple[Tensor, Tensor]:
    angle = _angles(position)
    return angle.cos(), angle.sin()


def _angles(position: Tensor) -> Tensor:
    return position[:, None] * 1e6 ** (-torch.arange(0, HEAD_SIZE, 2).double() / HEAD_SIZE)
