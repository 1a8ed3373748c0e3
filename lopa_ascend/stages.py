"""The stages of a decoder layer on the Ascend operations (common.model.ops.Ops over lopa_ascend.ops).

A layer in W8A8 is: add + norm + quantize, qkv, rotate, write KV, attend, quantize, o, all-reduce, add + norm +
quantize, gate and up as int32, dequantize + SwiGLU + quantize, down, all-reduce. In bfloat16 the quantizations fall
away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.model import Activation, Decoder, Linear, MoE, QKNorm, RMSNorm, Routing, rotary_table
from common.runtime import Collectives
from lopa_ascend.kv import PagedKVCache
from lopa_ascend.ops import WIDEST_GATE_UP, HeadNorms, Ops, VirtualRows, of_own_experts
from quant.experts import EXPERTS
from quant.linear import QuantizedLinear, QuantKernels
from quant.w8a8 import QuantizedActivation


@dataclass(frozen=True, slots=True)
class AttendStep:
    """What every layer of a pass shares. cos and sin span both halves of a head."""

    cos_T1H: Tensor
    sin_T1H: Tensor
    slot_T: Tensor
    rows: VirtualRows
    cache: PagedKVCache


class AscendStages:
    """num_heads: query heads of this rank. scale: the scale of the attention's scores
    (lopa_ascend.load.attention_scale).

    prefetch_bytes: bytes of the weight that is read after an all-reduce, which are pulled into L2 meanwhile, once
    `link_linears` has said which weight that is; 0: nothing is.
    """

    def __init__(
        self, ops: Ops, collectives: Collectives, num_heads: int, scale: float, prefetch_bytes: int = 0
    ) -> None:
        self._ops = ops
        self._tp_sum = collectives.tp_sum
        self._num_heads = num_heads
        self._scale = scale
        self._prefetch_bytes = prefetch_bytes if collectives.mesh.tp_size > 1 else 0

    def norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, norm: RMSNorm, consumer: nn.Module | None
    ) -> tuple[Activation, Tensor]:
        if residual_TD is None:
            return self._ops.rms_norm(x_TD, norm.weight, norm.eps), x_TD
        if _is_dynamic(consumer):
            fused = self._ops.add_rms_norm_dynamic_quant(x_TD, residual_TD, norm.weight, norm.eps)
            return QuantizedActivation(*fused.hidden), fused.residual
        return self._ops.add_rms_norm(x_TD, residual_TD, norm.weight, norm.eps)

    def linear(self, x: Activation, linear: nn.Module) -> Tensor:
        return self._prefetching(linear, linear(x))

    def attend(self, qkv_TE: Tensor, layer: int, step: AttendStep, qk_norm: QKNorm | None) -> Tensor:
        key_cache, value_cache = step.cache.layers[layer]
        norms = None if qk_norm is None else HeadNorms(qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps)
        query = self._ops.rotate_and_write(
            qkv_TE, step.cos_T1H, step.sin_T1H, self._num_heads, key_cache, value_cache, step.slot_T, norms
        )
        attended_TNH = self._ops.paged_attention(query, key_cache, value_cache, step.rows, self._scale)
        return attended_TNH.view(attended_TNH.shape[0], -1)

    def mlp(self, x: Activation, gate_up: nn.Module, down: nn.Module) -> Tensor:
        if not (_is_dynamic(gate_up) and _is_dynamic(down)):
            return self._prefetching(down, down(self._ops.swiglu(gate_up(x))))
        values, scale_T = x if isinstance(x, QuantizedActivation) else self._ops.dynamic_quant(x)
        if gate_up.weight.dim() == 3:  # as prepare_linears lays it out for one operator
            gated = self._ops.quant_matmul_swiglu_quant(values, gate_up.weight, gate_up.weight_scale, scale_T)
            return self._prefetching(down, down(QuantizedActivation(*gated)))
        gate_up_TI = self._ops.quant_matmul_int32(values, gate_up.weight, gate_up.weight_scale)
        gated = self._ops.dequant_swiglu_quant(gate_up_TI, gate_up.weight_scale[None], scale_T)
        return self._prefetching(down, down(QuantizedActivation(*gated)))

    def moe(self, x_TD: Tensor, moe: MoE) -> Tensor:
        """Mix experts, which lie as `lay_out_experts` leaves them; the router is in float32."""
        logits_TE = functional.linear(x_TD.float(), moe.router)
        routing, num_own = self._ops.route(logits_TE, moe.expert_bias, moe.config), len(moe.experts_gate_up)
        if num_own < moe.config.num_experts:
            routing = of_own_experts(routing, moe.first_expert, num_own)
        is_int8 = moe.experts_down.dtype == torch.int8
        mix = self._mixed_in_8_bits if is_int8 else self._mixed
        mixed_TD = mix(x_TD, routing, moe)
        if moe.shared_gate_up_proj is not None and moe.shared_down_proj is not None:
            mixed_TD += self.mlp(x_TD, moe.shared_gate_up_proj, moe.shared_down_proj)
        return self._prefetching(moe, mixed_TD)

    def _mixed(self, x_TD: Tensor, routing: Routing, moe: MoE) -> Tensor:
        rows = self._ops.dispatch(x_TD, routing.expert_TC, len(moe.experts_down))
        inner_NX = self._ops.swiglu(self._ops.grouped_matmul(rows.rows_ND, moe.experts_gate_up, rows.count_E))
        result_ND = self._ops.grouped_matmul(inner_NX, moe.experts_down, rows.count_E)
        return self._ops.combine(result_ND, rows.place_N, routing.weight_TC)

    def _mixed_in_8_bits(self, x_TD: Tensor, routing: Routing, moe: MoE) -> Tensor:
        """The same in 8 bits; a token is quantized once, before it is copied."""
        values, scale_T = self._ops.dynamic_quant(x_TD)
        rows = self._ops.dispatch(values, routing.expert_TC, len(moe.experts_down), scale_T)
        gate_up_NI = self._ops.grouped_matmul_int32(rows.rows_ND, moe.experts_gate_up, rows.count_E)
        gate_up_scale, down_scale = moe.get_buffer("experts_gate_up_scale"), moe.get_buffer("experts_down_scale")
        inner = self._ops.dequant_swiglu_quant(gate_up_NI, gate_up_scale, rows.scale_N, count_E=rows.count_E)
        result_ND = self._ops.grouped_quant_matmul(
            inner.values, moe.experts_down, rows.count_E, down_scale, inner.scale_T, x_TD.dtype
        )
        return self._ops.combine(result_ND, rows.place_N, routing.weight_TC)

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        x_TD = self._tp_sum(x_TD)
        if self._prefetch_bytes:
            self._ops.join_prefetch(x_TD)
        return x_TD

    def _prefetching(self, linear: nn.Module, y_TD: Tensor) -> Tensor:
        """Return y, the linear's result, and pull the weight that is read next into L2."""
        read_next = getattr(linear, "read_next", None) if self._prefetch_bytes else None
        if read_next is not None:
            weight = read_next[0].weight
            self._ops.prefetch_aside(weight, y_TD, min(self._prefetch_bytes, weight.nbytes))
        return y_TD

    def attention_lengths(self, rows: VirtualRows) -> dict[str, list[int]]:
        """The lengths that a captured graph freezes, by the operator's names."""
        return self._ops.attention_lengths(rows)


class RotaryTable:
    """cos and sin of every position, in the dtype that the operator demands: that of query and key.

    head_size: that of the model as it was loaded. rotary_size: values of a head that are rotated; the others keep the
    angle 0 (lopa_ascend.load.head_places).
    """

    def __init__(
        self, num_positions: int, rotary_size: int, head_size: int, theta: float, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        table_S2F = rotary_table(num_positions, rotary_size, theta, torch.device("cpu"))
        num_others = (head_size - rotary_size) // 2

        def both_halves(angles_SF: Tensor, of_zero: float) -> nn.Parameter:
            half_SF = functional.pad(angles_SF, (0, num_others), value=of_zero)
            both_S1H = torch.cat((half_SF, half_SF), dim=-1).unsqueeze(1).to(device, dtype)
            return nn.Parameter(both_S1H, requires_grad=False)

        self.cos_S1H, self.sin_S1H = both_halves(table_S2F[:, 0], 1.0), both_halves(table_S2F[:, 1], 0.0)

    def at(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos_S1H.index_select(0, position_T), self.sin_S1H.index_select(0, position_T)


def quant_kernels(ops: Ops) -> QuantKernels:
    """The matmul and quantizers of quantized linears, for weights and scales as `prepare_linears` leaves them."""

    def matmul(
        x_TK: Tensor, weight_KN: Tensor, scale_N: Tensor, scale_T: Tensor | None, bias_N: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        return ops.quant_matmul(x_TK, weight_KN, scale_N, scale_T=scale_T, bias_N=bias_N, dtype=dtype)

    def quantize(x_TK: Tensor) -> QuantizedActivation:
        return QuantizedActivation(*ops.dynamic_quant(x_TK))

    return QuantKernels(matmul, quantize, ops.static_quant)


def link_linears(model: Decoder) -> None:
    """Note at every linear before an all-reduce which one reads its weight after it; the last thing done to them."""
    layers = list(model.layers)
    followers = [*(layer.qkv_proj for layer in layers[1:]), model.lm_head]
    for layer, follower in zip(layers, followers, strict=True):
        # In a tuple: not a module of that module. Which experts are read is known only after the router.
        if layer.moe is None:
            layer.o_proj.read_next = (layer.gate_up_proj,)
        (layer.down_proj if layer.moe is None else layer.moe).read_next = (follower,)


def lay_out_experts(model: nn.Module) -> None:
    """Lay the weights of experts out as the grouped product reads them, [experts, in, out]. In 8 bits the scales of
    down become bfloat16, as the operator wants them, which loses nothing."""
    for moe in [module for module in model.modules() if isinstance(module, MoE)]:
        for name in EXPERTS:
            weight_EOK = moe.get_parameter(name).data
            setattr(moe, name, nn.Parameter(weight_EOK.transpose(1, 2).contiguous(), requires_grad=False))
        if moe.experts_down_scale is not None:
            moe.experts_down_scale = moe.experts_down_scale.bfloat16()


def prepare_linears(model: nn.Module, ops: Ops) -> None:
    """Lay quantized weights out as the operators want them, [K, N] in FRACTAL_NZ, the last thing done to them. What
    `ops.fuses_gate_up` takes is [1, K, N].

    Static input scales become their reciprocals, by which the operator multiplies.
    """
    in_groups = set(_fused_gate_ups(model)) if ops.fuses_gate_up else set()
    for linear in model.modules():
        if isinstance(linear, QuantizedLinear):
            weight_KN = linear.weight.t().contiguous()
            linear.weight = ops.to_nz(weight_KN[None] if linear in in_groups else weight_KN)
            if linear.input_scale is not None:
                linear.input_scale = linear.input_scale.reciprocal()


def _fused_gate_ups(model: nn.Module) -> Iterator[nn.Module]:
    """The linears of gate and up that one operator may compute together with what comes before down."""
    for module in model.modules():
        for prefix in ("", "shared_"):
            gate_up, down = (getattr(module, f"{prefix}{name}", None) for name in ("gate_up_proj", "down_proj"))
            if _is_dynamic(gate_up) and _is_dynamic(down) and len(gate_up.weight) <= WIDEST_GATE_UP:
                yield gate_up


class ColumnsLast(nn.Module):
    """A float linear whose weight lies as [in, out], the way a product reads it in a GE graph. GE would transpose
    [out, in] anew in every run, the head's weight as well: it knows frozen weights by address only."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.t().contiguous(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x_TK: Tensor) -> Tensor:
        return x_TK @ self.weight if self.bias is None else torch.addmm(self.bias, x_TK, self.weight)


def put_columns_last(model: nn.Module) -> None:
    """Turn every float linear of the model into `ColumnsLast`, one at a time."""
    for name, linear in [(name, module) for name, module in model.named_modules() if isinstance(module, Linear)]:
        model.set_submodule(name, ColumnsLast(linear))


def as_parameters(model: nn.Module) -> None:
    """Turn every buffer into a parameter: what torchair takes for memory that stays at its address."""
    for module in model.modules():
        for name, tensor in [(name, tensor) for name, tensor in module._buffers.items() if tensor is not None]:
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _is_dynamic(linear: nn.Module | None) -> bool:
    return isinstance(linear, QuantizedLinear) and not linear.is_static
