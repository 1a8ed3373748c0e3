"""The operations of one decoder step, in the engine's words; the only code that names torch_npu's operators.

The engine computes a flat batch: T tokens of all rows of this rank. An `Ops` turns each operation into one torch_npu
call, with every option that has a dangerous default written out. It calls either torch_npu (`npu_ops`) or the CPU twins
(`reference_ops`), with the same keywords: what holds in one lane is what is sent in the other.

Letters: T tokens, D model width, N query heads, K KV heads, H head size, P pages.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from lopa_ascend.ops import fused_kv, in_graph, side_stream
from lopa_ascend.ops.experts import ExpertOps
from lopa_ascend.ops.results import (
    USUAL_ATTENTION,
    AttentionForm,
    HeadNorms,
    Normed,
    Projections,
    Quantized,
    QuantizedNorm,
)
from lopa_ascend.ops.rows import MOST_ROWS, VirtualRows
from lopa_ascend.ops.twins.weights import FRACTAL_NZ


class Ops(ExpertOps):
    """`kernels` has torch_npu's functions under torch_npu's names.

    writes_kv_by_atb: with the operator of older releases, which needs the ATB library of CANN's nnal package.
    fuses_kv_write: split, rotation and KV write are one Triton-Ascend kernel (`fused_kv`). fuses_gate_up: so are the
    int8 product of gate and up and what follows it before down's; their weight is laid out for it.
    """

    def __init__(
        self, kernels: Any, attention: AttentionForm = USUAL_ATTENTION, *, writes_kv_by_atb: bool = False,
        fuses_kv_write: bool = False, fuses_gate_up: bool = False,
    ) -> None:  # fmt: skip
        self._kernels = kernels
        self.attention = attention
        self.writes_kv_by_atb = writes_kv_by_atb
        self.fuses_kv_write = fuses_kv_write
        self.fuses_gate_up = fuses_gate_up
        self._group_lists: dict[tuple[torch.device, int], Tensor] = {}

    def with_attention(self, attention: AttentionForm) -> Ops:
        return self._with(attention=attention)

    def with_kv_writes_by_atb(self) -> Ops:
        return self._with(writes_kv_by_atb=True)

    def with_fused_kv_write(self) -> Ops:
        return self._with(fuses_kv_write=True)

    def with_fused_gate_up(self) -> Ops:
        return self._with(fuses_gate_up=True)

    def _with(self, **changed: Any) -> Ops:
        other = copy(self)
        vars(other).update(changed)
        return other

    def rms_norm(self, x_TD: Tensor, gamma_D: Tensor, epsilon: float) -> Tensor:
        """Over the last dimension."""
        normed, _ = self._kernels.npu_rms_norm(x_TD, gamma_D, epsilon)
        return normed

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, gamma_D: Tensor, epsilon: float) -> Normed:
        """Norm of x + residual. x and residual have one shape; gamma has their dtype."""
        hidden, _, total = self._kernels.npu_add_rms_norm(x_TD, residual_TD, gamma_D, epsilon)
        return Normed(hidden, total)

    def add_rms_norm_dynamic_quant(
        self, x_TD: Tensor, residual_TD: Tensor, gamma_D: Tensor, epsilon: float, smooth_D: Tensor | None = None
    ) -> QuantizedNorm:
        """Norm of x + residual, times `smooth` if any, as int8 per token; nothing is rounded in between."""
        values, _, total, scale_T, _ = self._kernels.npu_add_rms_norm_dynamic_quant(
            x_TD, residual_TD, gamma_D, smooth_scale1=smooth_D, epsilon=epsilon, output_mask=[True, False]
        )
        return QuantizedNorm(Quantized(values, scale_T), total)

    def dynamic_quant(self, x_TD: Tensor, smooth_D: Tensor | None = None) -> Quantized:
        """x, times `smooth` if any, as symmetric int8 per token."""
        return Quantized(*self._kernels.npu_dynamic_quant(x_TD, smooth_scales=smooth_D))

    def static_quant(self, x_TD: Tensor, reciprocal_scale: Tensor, offset: Tensor) -> Tensor:
        """round(x * reciprocal_scale + offset) as int8; both have 1 or D values and one dtype."""
        return self._kernels.npu_quantize(x_TD, reciprocal_scale, offset, torch.qint8, axis=-1, div_mode=False)

    def quant_matmul(
        self,
        x: Tensor,
        weight_KN: Tensor,
        weight_scale_N: Tensor,
        *,
        scale_T: Tensor | None = None,
        bias_N: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """x int8 [T, K] @ weight int8 [K, N], in real units. An int32 bias joins before the scales, a float one after.

        scale_T is the dynamic scale per token; with static quantization it is None and weight_scale_N holds the product
        of both scales. The result is bfloat16 on a device.
        """
        return self._kernels.npu_quant_matmul(
            x, weight_KN, weight_scale_N, pertoken_scale=scale_T, bias=bias_N, output_dtype=dtype
        )

    def quant_matmul_int32(self, x: Tensor, weight_KN: Tensor, weight_scale_N: Tensor) -> Tensor:
        """The int32 accumulator of x @ weight, for `dequant_swiglu_quant`; the operator wants the scale, unused."""
        return self._kernels.npu_quant_matmul(x, weight_KN, weight_scale_N, output_dtype=torch.int32)

    def dequant_swiglu_quant(
        self, gate_up: Tensor, weight_scale: Tensor, scale_T: Tensor, smooth: Tensor | None = None,
        count_E: Tensor | None = None,
    ) -> Quantized:  # fmt: skip
        """int32 [T, gate | up] -> int8 of silu(gate) * up. weight_scale is [1, gate + up], smooth [1, gate]; with the
        rows of each expert it is [E, gate + up]."""
        values, scale = self._kernels.npu_dequant_swiglu_quant(
            gate_up,
            weight_scale=weight_scale,
            activation_scale=scale_T,
            quant_scale=smooth,
            group_index=count_E,
            activate_left=True,
            quant_mode=1,
        )
        return Quantized(values, scale)

    def quant_matmul_swiglu_quant(
        self, x: Tensor, weight_1KN: Tensor, weight_scale_N: Tensor, scale_T: Tensor
    ) -> Quantized:
        """`quant_matmul_int32` and `dequant_swiglu_quant` as one operator, whose accumulators stay on the chip.
        weight_1KN: gate and up as one group of experts, in FRACTAL_NZ; N is at most 10240."""
        # Every default is the one that is wanted: int8 per token out, and groups by cumulative counts.
        values, scale = self._kernels.npu_grouped_matmul_swiglu_quant_v2(
            x, [weight_1KN], [weight_scale_N[None]], scale_T, self._one_group(x)
        )
        return Quantized(values, scale)

    def _one_group(self, x: Tensor) -> Tensor:
        """The group list of one group: made once a size, since a capture would fill it anew in every replay."""
        key = (x.device, len(x))
        if key not in self._group_lists:
            self._group_lists[key] = torch.tensor([len(x)], dtype=torch.int64, device=x.device)
        return self._group_lists[key]

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [T, gate | up]."""
        return self._kernels.npu_swiglu(gate_up, dim=-1)

    def split_and_rotate(
        self, qkv: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, num_heads: int, norms: HeadNorms | None = None
    ) -> Projections:
        """Split [T, (N + K + K) * H], norm query and key by head, rotate them. cos and sin span both halves. `qkv` is
        consumed.

        The operator overwrites its inputs although its schema says otherwise; here they are copies that nobody else
        holds (attention and cache need contiguous tensors anyway).
        """
        head_size = cos_T1H.shape[-1]
        heads_TNH = qkv.view(qkv.shape[0], -1, head_size)
        num_kv_heads = (heads_TNH.shape[1] - num_heads) // 2
        parts = torch.split(heads_TNH, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        query, key, value = (part.contiguous() for part in parts)
        if norms is not None:
            query = self.rms_norm(query, norms.query_H, norms.epsilon)
            key = self.rms_norm(key, norms.key_H, norms.epsilon)
        query, key = self._kernels.npu_apply_rotary_pos_emb(query, key, cos_T1H, sin_T1H, layout="TND")
        return Projections(query, key, value)

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_T: Tensor) -> None:
        """Store [T, K, H] at flat slots page * page_size + offset of caches [P, page_size, K, H].

        Slots are int32, in range and unique: padding and shift entries go to slots of a dummy page of their own.
        """
        if self.writes_kv_by_atb:
            self._kernels._npu_reshape_and_cache(key, value, key_cache, value_cache, slot_T)
        else:
            self._kernels.npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_T, cache_mode="Norm")

    def rotate_and_write(
        self, qkv: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, num_heads: int, key_cache: Tensor, value_cache: Tensor,
        slot_T: Tensor, norms: HeadNorms | None = None,
    ) -> Tensor:  # fmt: skip
        """`split_and_rotate`, then `write_kv`; the rotated query [T, N, H]."""
        if self.fuses_kv_write and len(qkv) <= fused_kv.MOST_TOKENS:
            assert norms is None, "the kernel norms no heads, as lopa_ascend.limits says"
            return fused_kv.rotate_and_write(qkv, cos_T1H, sin_T1H, key_cache, value_cache, slot_T, num_heads)
        query, key, value = self.split_and_rotate(qkv, cos_T1H, sin_T1H, num_heads, norms)
        self.write_kv(key, value, key_cache, value_cache, slot_T)
        return query

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: VirtualRows, scale: float
    ) -> Tensor:
        """softmax(scale * query @ keys) @ values of every virtual row, [T, N, H]; write_kv comes before it."""
        if len(rows.query_ends) > MOST_ROWS:
            parts = (
                self.paged_attention(query[own], key_cache, value_cache, part, scale) for own, part in rows.parts()
            )
            return torch.cat(list(parts))
        num_pages, page_size, num_kv_heads, head_size = key_cache.shape
        assert num_kv_heads == 1 or self.attention.view_dims == 3, "4-D pages are those of one KV head"
        view = (num_pages, page_size, -1) if self.attention.view_dims == 3 else (num_pages, 1, page_size, head_size)
        keys, values = key_cache.view(view), value_cache.view(view)
        if isinstance(rows.query_ends, Tensor) and isinstance(rows.kv_lengths, Tensor):
            return in_graph.paged_attention(
                query, keys, values, rows.query_ends, rows.kv_lengths, rows.block_table, num_kv_heads, page_size, scale
            )
        shared = {
            "block_table": rows.block_table,
            "num_key_value_heads": num_kv_heads,
            "input_layout": "TND",
            "sparse_mode": 0,
            "block_size": page_size,
            **self.attention_lengths(rows),
        }
        if self.attention.version == 2:
            attended, _ = self._kernels.npu_fused_infer_attention_score_v2(
                query, keys, values, num_query_heads=query.shape[1], softmax_scale=scale, **shared
            )
        else:
            attended, _ = self._kernels.npu_fused_infer_attention_score(
                query, keys, values, num_heads=query.shape[1], scale=scale, **shared
            )
        return attended

    def attention_lengths(self, rows: VirtualRows) -> dict[str, Any]:
        """The operator's lengths, which a captured graph freezes: as NPUGraph.update(cpu_update_input=...) wants it."""
        if self.attention.version == 2:
            return {"actual_seq_qlen": rows.query_ends, "actual_seq_kvlen": rows.kv_lengths}
        return {"actual_seq_lengths": rows.query_ends, "actual_seq_lengths_kv": rows.kv_lengths}

    def to_nz(self, weight_KN: Tensor) -> Tensor:
        """The weight, or those of groups [E, K, N], in the cube unit's layout. The last thing done to it: never view,
        slice or write the result."""
        return self._kernels.npu_format_cast(weight_KN, FRACTAL_NZ)

    def prefetch(self, weight: Tensor, after: Tensor, num_bytes: int) -> None:
        """Pull the weight's first bytes into L2 once `after` has been computed (useful under a collective)."""
        self._kernels.npu_prefetch(weight, after, num_bytes)

    def prefetch_aside(self, weight: Tensor, after: Tensor, num_bytes: int) -> None:
        """The same on a second stream of the device, until `join_prefetch`."""
        if weight.device.type == "cpu":
            self.prefetch(weight, after, num_bytes)
        else:
            side_stream.prefetch(weight, after, num_bytes)

    def join_prefetch(self, x: Tensor) -> None:
        """What follows waits for the second stream; before a capture ends it has to."""
        if x.device.type != "cpu":
            side_stream.join(x)
