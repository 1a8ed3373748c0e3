"""Every documented rule refuses a call that breaks it, and says which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_ascend.ops import OpRuleError, twins

BF16, F32, I8, I32 = torch.bfloat16, torch.float32, torch.int8, torch.int32


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def strided(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """The right shape, not contiguous."""
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]


def rms_norm(x: Tensor | None = None, gamma: Tensor | None = None) -> None:
    twins.npu_rms_norm(zeros(4, 32) if x is None else x, zeros(32) if gamma is None else gamma, 1e-6)


def add_rms_norm(**change: Any) -> None:
    call = {"x1": zeros(4, 32), "x2": zeros(4, 32), "gamma": zeros(32), **change}
    twins.npu_add_rms_norm(call["x1"], call["x2"], call["gamma"], 1e-6)


def add_rms_norm_dynamic_quant(**change: Any) -> None:
    call = {"x1": zeros(4, 32), "x2": zeros(4, 32), "gamma": zeros(32), "output_mask": [True, False], **change}
    twins.npu_add_rms_norm_dynamic_quant(**call)


def dynamic_quant(**change: Any) -> None:
    twins.npu_dynamic_quant(**{"input": zeros(4, 32), **change})


def quantize(**change: Any) -> None:
    call = {"input": zeros(4, 32), "scales": zeros(32), "zero_points": zeros(32), "dtype": torch.qint8, **change}
    twins.npu_quantize(**call, axis=-1, div_mode=False)


def quant_matmul(**change: Any) -> None:
    call = {"x1": zeros(4, 32, dtype=I8), "x2": zeros(32, 16, dtype=I8), "scale": zeros(16, dtype=F32)}
    twins.npu_quant_matmul(**{**call, "output_dtype": BF16, **change})


def dequant_swiglu_quant(**change: Any) -> None:
    call = {"x": zeros(4, 64, dtype=I32), "weight_scale": zeros(1, 64, dtype=F32), "quant_mode": 1}
    twins.npu_dequant_swiglu_quant(**{**call, "activation_scale": zeros(4, dtype=F32), **change})


def dequant_of_groups(**change: Any) -> None:
    call = {"x": zeros(4, 128, dtype=I32), "weight_scale": zeros(2, 128, dtype=F32)}
    dequant_swiglu_quant(**{**call, "group_index": torch.tensor([3, 1]), **change})


def gate_up_in_one(**change: Any) -> None:
    call = {"x": zeros(4, 32, dtype=I8), "weight": [zeros(1, 32, 64, dtype=I8)], "x_scale": zeros(4, dtype=F32)}
    call |= {"weight_scale": [zeros(1, 64, dtype=F32)], "group_list": torch.tensor([4])}
    twins.npu_grouped_matmul_swiglu_quant_v2(**{**call, **change})


def rotary(**change: Any) -> None:
    call = {"query": zeros(4, 7, 128), "key": zeros(4, 1, 128), "cos": zeros(4, 1, 128), "sin": zeros(4, 1, 128)}
    twins.npu_apply_rotary_pos_emb(**{**call, "layout": "TND", **change})


def scatter(**change: Any) -> None:
    call = {"key": zeros(3, 1, 128), "value": zeros(3, 1, 128), "slot_mapping": torch.arange(3, dtype=I32)}
    caches = {"key_cache": zeros(2, 128, 1, 128), "value_cache": zeros(2, 128, 1, 128)}
    twins.npu_scatter_pa_kv_cache(**{**call, **caches, "cache_mode": "Norm", **change})


def attention(**change: Any) -> None:
    call = {"query": zeros(64, 7, 128), "key": zeros(4, 128, 128), "value": zeros(4, 128, 128)}
    lengths = {"actual_seq_qlen": [32, 64], "actual_seq_kvlen": [132, 164]}
    heads = {"num_query_heads": 7, "num_key_value_heads": 1, "input_layout": "TND", "block_size": 128}
    table = {"block_table": torch.tensor([[0, 1], [0, 1]], dtype=I32)}
    twins.npu_fused_infer_attention_score_v2(**{**call, **lengths, **heads, **table, **change})


def attention_v1(**change: Any) -> None:
    call = {"query": zeros(64, 7, 128), "key": zeros(4, 128, 128), "value": zeros(4, 128, 128)}
    lengths = {"actual_seq_lengths": [32, 64], "actual_seq_lengths_kv": [132, 164]}
    heads = {"num_heads": 7, "num_key_value_heads": 1, "input_layout": "TND", "block_size": 128}
    table = {"block_table": torch.tensor([[0, 1], [0, 1]], dtype=I32)}
    twins.npu_fused_infer_attention_score(**{**call, **lengths, **heads, **table, **change})


def format_cast(**change: Any) -> None:
    twins.npu_format_cast(**{"input": zeros(32, 16, dtype=I8), "acl_format": 29, **change})


def prefetch(**change: Any) -> None:
    twins.npu_prefetch(**{"input": zeros(32, 16), "dependency": None, "max_size": 64, **change})


def gating(**change: Any) -> None:
    call = {"x": zeros(4, 64, dtype=F32), "k": 8, "bias": zeros(64, dtype=F32), "k_group": 4, "group_count": 8}
    twins.npu_moe_gating_top_k(**{**call, "group_select_mode": 1, "norm_type": 1, **change})


def gating_softmax(**change: Any) -> None:
    twins.npu_moe_gating_top_k_softmax(**{"x": zeros(4, 64, dtype=F32), "k": 8, **change})


def routing(**change: Any) -> None:
    call = {"x": zeros(4, 32), "expert_idx": torch.arange(8, dtype=I32).view(4, 2), "active_num": 8, "expert_num": 8}
    counts = {"expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [0, 8]}
    twins.npu_moe_init_routing_v2(**{**call, **counts, **change})


def grouped_matmul(**change: Any) -> None:
    call = {"x": [zeros(6, 32)], "weight": [zeros(3, 32, 16)], "group_list": torch.tensor([4, 0, 2])}
    twins.npu_grouped_matmul(**{**call, "split_item": 2, "group_type": 0, "group_list_type": 1, **change})


def grouped_matmul_int8(**change: Any) -> None:
    call = {"x": [zeros(6, 32, dtype=I8)], "weight": [zeros(3, 32, 16, dtype=I8)], "scale": [zeros(3, 16)]}
    grouped_matmul(**{**call, "per_token_scale": [zeros(6, dtype=F32)], "output_dtype": BF16, **change})


def unpermute(**change: Any) -> None:
    call = {"permuted_tokens": zeros(8, 32), "sorted_indices": torch.arange(8, dtype=I32)}
    twins.npu_moe_token_unpermute(**{**call, "probs": zeros(4, 2, dtype=F32), **change})


CALLS: list[Callable[..., None]] = [
    gating,
    gating_softmax,
    routing,
    grouped_matmul,
    grouped_matmul_int8,
    unpermute,
    rms_norm,
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    dynamic_quant,
    quantize,
    quant_matmul,
    dequant_swiglu_quant,
    dequant_of_groups,
    gate_up_in_one,
    rotary,
    scatter,
    attention,
    attention_v1,
    format_cast,
    prefetch,
]

# (call, what is changed, the rule that must answer)
REJECTED: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (rms_norm, {"gamma": zeros(32, dtype=F32)}, "gamma has the input's dtype"),
    (rms_norm, {"gamma": zeros(16)}, "gamma's shape"),
    (rms_norm, {"x": zeros(4, 32, dtype=I32)}, "input dtype"),
    (rms_norm, {"x": zeros(0, 32)}, "not empty"),
    (add_rms_norm, {"x2": zeros(1, 32)}, "without broadcasting"),
    (add_rms_norm, {"x2": zeros(4, 32, dtype=torch.float16)}, "same dtype"),
    (add_rms_norm_dynamic_quant, {"x1": zeros(4, 32, dtype=F32), "x2": zeros(4, 32, dtype=F32)}, "input dtype"),
    (add_rms_norm_dynamic_quant, {"x1": zeros(32), "x2": zeros(32)}, "2 to 8 dimensions"),
    (add_rms_norm_dynamic_quant, {"output_mask": [False, False]}, "at least one output"),
    (add_rms_norm_dynamic_quant, {"smooth_scale1": zeros(32, dtype=F32)}, "gamma's shape and dtype"),
    (add_rms_norm_dynamic_quant, {"smooth_scale2": zeros(32)}, "output_mask\\[1\\]"),
    (add_rms_norm_dynamic_quant, {"smooth_scale1": zeros(32), "output_mask": [False, True]}, "output_mask\\[0\\]"),
    (add_rms_norm_dynamic_quant, {"smooth_scale2": zeros(32), "output_mask": None}, "needs smooth_scale1"),
    (dynamic_quant, {"input": zeros(4, 32, dtype=F32)}, "float16 or bfloat16"),
    (dynamic_quant, {"input": zeros(32)}, "two dimensions"),
    (dynamic_quant, {"smooth_scales": zeros(32, dtype=F32)}, "input's dtype"),
    (dynamic_quant, {"smooth_scales": zeros(31)}, "per channel"),
    (quantize, {"input": zeros(4, 32, dtype=I32)}, "input is"),
    (quantize, {"scales": zeros(32, dtype=I32)}, "scales is float"),
    (quantize, {"scales": zeros(7)}, "1 or 32 values"),
    (quantize, {"zero_points": zeros(32, dtype=I32)}, "zero_points has"),
    (quantize, {"dtype": torch.int8}, "qint8"),
    (quant_matmul, {"x1": zeros(4, 32)}, "are int8"),
    (quant_matmul, {"x2": zeros(16, 32, dtype=I8)}, "x2 \\[K, N\\]"),
    (quant_matmul, {"scale": zeros(16, dtype=torch.float16)}, "scale is float32 or bfloat16"),
    (quant_matmul, {"scale": zeros(15, dtype=F32)}, "N=16"),
    (quant_matmul, {"pertoken_scale": zeros(4)}, "pertoken_scale is float32"),
    (quant_matmul, {"pertoken_scale": zeros(3, dtype=F32)}, "M=4"),
    (quant_matmul, {"pertoken_scale": zeros(4, 1, dtype=F32)}, "M=4"),
    (quant_matmul, {"pertoken_scale": zeros(4, dtype=F32), "output_dtype": I32}, "takes no pertoken_scale"),
    (quant_matmul, {"bias": zeros(16, dtype=torch.float16)}, "bias for"),
    (quant_matmul, {"bias": zeros(16), "output_dtype": I32}, "bias for"),
    (quant_matmul, {"bias": zeros(15)}, "bias has shape"),
    (quant_matmul, {"x1": zeros(0, 32, dtype=I8)}, "not empty"),
    (quant_matmul, {"x1": zeros(1, 65536, dtype=I8), "x2": zeros(65536, 16, dtype=I8)}, "65535"),
    (dequant_swiglu_quant, {"x": zeros(2, 2, 64, dtype=I32)}, "2-D"),
    (dequant_swiglu_quant, {"x": zeros(4, 63, dtype=I32)}, "even"),
    (dequant_swiglu_quant, {"weight_scale": None}, "both scales"),
    (dequant_swiglu_quant, {"activation_scale": None}, "both scales"),
    (dequant_swiglu_quant, {"weight_scale": zeros(1, 64)}, "weight_scale is float32"),
    (dequant_swiglu_quant, {"weight_scale": zeros(64, dtype=F32)}, "\\[1, 64\\]"),
    (dequant_swiglu_quant, {"activation_scale": zeros(3, dtype=F32)}, "activation_scale is float32"),
    (dequant_swiglu_quant, {"quant_scale": zeros(32, dtype=F32)}, "quant_scale has"),
    (dequant_swiglu_quant, {"quant_mode": 2}, "quant_mode"),
    (gate_up_in_one, {"weight": [zeros(1, 32, 64, dtype=I8)] * 2}, "one weight and one scale"),
    (gate_up_in_one, {"x": zeros(4, 32)}, "are int8"),
    (gate_up_in_one, {"weight": [zeros(32, 64, dtype=I8)]}, "weight \\[E, K, N\\]"),
    (gate_up_in_one, {"weight": [zeros(1, 32, 10242, dtype=I8)]}, "at most 10240"),
    (gate_up_in_one, {"weight_scale": [zeros(64, dtype=F32)]}, "\\[1, 64\\]"),
    (gate_up_in_one, {"x_scale": zeros(4, 1, dtype=F32)}, "x_scale is float32"),
    (gate_up_in_one, {"group_list": torch.tensor([3])}, "cumulative counts of 4 rows"),
    (gate_up_in_one, {"group_list": torch.tensor([4], dtype=I32)}, "group_list is int64"),
    (dequant_of_groups, {"group_index": torch.tensor([3, 1], dtype=I32)}, "int64 counts"),
    (dequant_of_groups, {"group_index": torch.tensor([3, 2])}, "sum up to the 4 rows"),
    (dequant_of_groups, {"group_index": torch.tensor([3, 1, 0])}, "\\[3, 128\\]"),
    (dequant_of_groups, {"x": zeros(4, 64, dtype=I32), "weight_scale": zeros(2, 64, dtype=F32)}, "multiple of 64"),
    (rotary, {"rotary_mode": "interleave"}, "rotary_mode"),
    (rotary, {"layout": "SBND"}, "layout"),
    (rotary, {"query": zeros(1, 4, 7, 128)}, "3-D"),
    (rotary, {"key": zeros(0, 1, 128)}, "not empty"),
    (rotary, {"cos": zeros(1, 1, 128)}, "no broadcasting"),
    (rotary, {"cos": zeros(4, 1, 128, dtype=F32)}, "share a float dtype"),
    (rotary, {"key": zeros(4, 1, 64)}, "query's head size"),
    (rotary, {"cos": zeros(4, 1, 64), "sin": zeros(4, 1, 64)}, "both halves"),
    (rotary, {"query": zeros(4, 7, 96), "key": zeros(4, 1, 96)}, "64 or 128"),
    (scatter, {"cache_mode": "ND"}, "cache_mode"),
    (scatter, {"value": zeros(3, 2, 128)}, "key and value are"),
    (scatter, {"key": strided(3, 1, 128)}, "key is contiguous"),
    (scatter, {"value": strided(3, 1, 128)}, "value is contiguous"),
    (scatter, {"key_cache": strided(2, 128, 1, 128)}, "key_cache is contiguous"),
    (scatter, {"value_cache": zeros(2, 128, 1, 128, dtype=F32)}, "key's dtype"),
    (scatter, {"key_cache": zeros(2, 1, 128, 128)}, "in mode Norm"),
    (scatter, {"value_cache": zeros(3, 128, 1, 128)}, "same pages"),
    (scatter, {"slot_mapping": torch.arange(3, dtype=torch.int16)}, "int32 or int64"),
    (scatter, {"slot_mapping": torch.arange(4, dtype=I32)}, "shape \\[3\\]"),
    (scatter, {"slot_mapping": torch.tensor([0, 1, -1], dtype=I32)}, "not to -1"),
    (scatter, {"slot_mapping": torch.tensor([0, 1, 256], dtype=I32)}, "\\[0, 255\\]"),
    (scatter, {"slot_mapping": torch.tensor([0, 1, 1], dtype=I32)}, "unique"),
    (attention, {"sparse_mode": 7}, "sparse_mode"),
    (attention, {"sparse_mode": 2}, "sparse_mode"),
    (attention, {"atten_mask": zeros(2048, 2048, dtype=I8)}, "no mask"),
    (attention, {"actual_seq_qlen": None}, "needs query and KV lengths"),
    (attention, {"actual_seq_kvlen": None}, "needs query and KV lengths"),
    (attention, {"actual_seq_qlen": [64, 32]}, "cumulative"),
    (attention, {"actual_seq_qlen": [32, 32]}, "T=64"),
    (attention, {"actual_seq_kvlen": [132]}, "one KV length"),
    (attention, {"actual_seq_kvlen": [132, -1]}, "not negative"),
    (attention, {"actual_seq_qlen": [0] * 4096 + [64], "actual_seq_kvlen": [1] * 4097}, "4096 rows"),
    (attention, {"query": zeros(1, 64, 7, 128)}, "in TND"),
    (attention, {"num_query_heads": 8}, "num_heads=8"),
    (attention, {"num_query_heads": 0, "query": zeros(64, 0, 128)}, "1 to 256"),
    (attention, {"num_key_value_heads": 2}, "multiple of KV heads"),
    (attention, {"num_query_heads": 65, "query": zeros(64, 65, 128)}, "at most 64"),
    (attention, {"query": strided(64, 7, 128)}, "query is contiguous"),
    (attention, {"key": strided(4, 128, 128)}, "key is contiguous"),
    (attention, {"value": zeros(4, 128, 128, dtype=F32)}, "query's dtype"),
    (attention, {"value": zeros(5, 128, 128)}, "same shape"),
    (
        attention,
        {n: zeros(s, 7 if s == 64 else 128, 128, dtype=F32) for n, s in (("query", 64), ("key", 4), ("value", 4))},
        "bfloat16 only",
    ),
    (attention, {"query": zeros(64, 7, 64), "key": zeros(4, 128, 64), "value": zeros(4, 128, 64)}, "head size is 128"),
    (attention, {"block_size": 64}, "block_size is 128"),
    (attention, {"block_size": 256}, "cache is"),
    (attention, {"block_table": zeros(2, 2, dtype=torch.int64)}, "int32"),
    (attention, {"block_table": zeros(3, 2, dtype=I32)}, "2 rows"),
    (attention, {"block_table": zeros(2, 1, dtype=I32)}, "a column for each of 2 pages"),
    (attention, {"block_table": torch.full((2, 2), 4, dtype=I32)}, "page ids"),
    (attention, {"block_table": torch.full((2, 2), -1, dtype=I32)}, "page ids"),
    (attention_v1, {"query": zeros(65537, 7, 128), "actual_seq_lengths": [32, 65537]}, "T is at most 65536"),
    (format_cast, {"input": zeros(4, 4, 4, 4, dtype=I8)}, "\\[E, K, N\\] of experts"),
    (format_cast, {"input": zeros(32, 16, dtype=F32)}, "int8 and halves"),
    (format_cast, {"input": zeros(32, 16, dtype=I8).T}, "contiguous before"),
    (gating, {"x": zeros(4, 64, dtype=I32)}, "float16, bfloat16 or float32"),
    (gating, {"x": zeros(1, 4, 64, dtype=F32)}, "\\[T, E\\]"),
    (gating, {"x": zeros(4, 4096, dtype=F32), "bias": None}, "at most 2048 experts"),
    (gating, {"bias": zeros(64)}, "bias has x's dtype"),
    (gating, {"bias": zeros(32, dtype=F32)}, "shape \\[64\\]"),
    (gating, {"group_count": 7}, "divides the experts"),
    (gating, {"group_count": 32}, "more than two experts"),
    (gating, {"x": zeros(4, 1280, dtype=F32), "bias": None, "group_count": 128}, "rounded up to 32"),
    (gating, {"k_group": 9}, "k_group is 1 to 8"),
    (gating, {"k": 33}, "k is at most 32"),
    (gating, {"renorm": 1}, "renorm is 0"),
    (gating_softmax, {"x": zeros(4, 64, dtype=I8)}, "float16, bfloat16 or float32"),
    (gating_softmax, {"k": 65}, "of the experts"),
    (routing, {"x": zeros(4, 32, dtype=I32)}, "floats or int8"),
    (routing, {"expert_idx": torch.arange(8).view(4, 2)}, "expert_idx is int32"),
    (routing, {"expert_idx": torch.arange(6, dtype=I32).view(3, 2)}, "int32 \\[4, C\\]"),
    (routing, {"active_num": 4}, "active_num is T \\* C = 8"),
    (routing, {"expert_num": 10241}, "at most 10240"),
    (routing, {"drop_pad_mode": 1}, "drop_pad_mode is 0"),
    (routing, {"expert_tokens_num_type": 0}, "expert_tokens_num_type is 1 or 2"),
    (routing, {"expert_tokens_num_flag": False}, "expert_tokens_num_flag is True"),
    (routing, {"quant_mode": 0}, "quant_mode is -1 or 1"),
    (routing, {"expert_num": 7, "active_expert_range": [0, 7]}, "experts lie in \\[0, 6\\]"),
    (routing, {"scale": zeros(8, dtype=F32)}, "scale is float32 with shape \\[4\\]"),
    (grouped_matmul, {"weight": [zeros(32, 16)]}, "weight 3-D"),
    (grouped_matmul, {"weight": [zeros(3, 16, 32)]}, "\\[E, K, O\\]"),
    (grouped_matmul, {"weight": [zeros(3, 32, 16, dtype=F32)]}, "one dtype"),
    (grouped_matmul, {"x": [zeros(6, 32, dtype=I32)], "weight": [zeros(3, 32, 16, dtype=I32)]}, "floats or int8"),
    (grouped_matmul, {"x": [zeros(6, 65536)], "weight": [zeros(3, 65536, 1)]}, "below 65536"),
    (grouped_matmul, {"split_item": 0}, "split_item is 2 or 3"),
    (grouped_matmul, {"group_type": None}, "group_type is 0"),
    (grouped_matmul, {"group_list": None}, "needs a group_list"),
    (grouped_matmul, {"group_list": torch.tensor([4, 0, 2], dtype=I32)}, "group_list is int64"),
    (grouped_matmul, {"group_list": torch.tensor([4, 2])}, "shape \\[3\\]"),
    (grouped_matmul, {"weight": [zeros(1, 32, 16)], "group_list": torch.tensor([6])}, "2 to 1024 groups"),
    (grouped_matmul, {"group_list": torch.tensor([4, 0, 1])}, "sum up to the 6 rows"),
    (grouped_matmul, {"group_list": torch.tensor([4, -1, 3])}, "not negative"),
    (grouped_matmul, {"output_dtype": F32}, "output_dtype is that of x"),
    (grouped_matmul, {"scale": [zeros(3, 16)]}, "floats take no scale"),
    (grouped_matmul_int8, {"scale": [zeros(3, 16, dtype=F32)]}, "scale is bfloat16"),
    (grouped_matmul_int8, {"per_token_scale": [zeros(3, dtype=F32)]}, "per_token_scale is float32"),
    (grouped_matmul_int8, {"output_dtype": I32}, "int32 output takes no scale"),
    (unpermute, {"permuted_tokens": zeros(8, 32, dtype=I8)}, "\\[N, D\\] floats"),
    (unpermute, {"sorted_indices": torch.arange(8)}, "sorted_indices is int32"),
    (unpermute, {"sorted_indices": torch.tensor([0, 1, 2, 3, 4, 5, 6, 6], dtype=I32)}, "each of 0 to 7 once"),
    (unpermute, {"probs": zeros(4, 2, dtype=I32)}, "probs is"),
    (unpermute, {"probs": zeros(3, 2, dtype=F32)}, "probs has 8 values"),
    (
        unpermute,
        {
            "permuted_tokens": zeros(513, 2),
            "sorted_indices": torch.arange(513, dtype=I32),
            "probs": zeros(1, 513, dtype=F32),
        },
        "at most 512 choices",
    ),
    (prefetch, {"max_size": 0}, "positive"),
    (prefetch, {"offset": 1 << 20}, "inside the tensor"),
]

# Valid on a device, unused by the engine: refused rather than guessed.
UNMODELLED: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (add_rms_norm_dynamic_quant, {"output_mask": [True, True]}, "output_mask"),
    (add_rms_norm_dynamic_quant, {"beta": zeros(32)}, "beta"),
    (quant_matmul, {"output_dtype": None}, "None means int8"),
    (quant_matmul, {"output_dtype": torch.float16}, "output_dtype"),
    (gate_up_in_one, {"weight": [zeros(2, 32, 64, dtype=I8)]}, "several_groups"),
    (dequant_swiglu_quant, {"quant_mode": 0}, "static_quant_mode"),
    (dequant_swiglu_quant, {"x": zeros(4, 64)}, "x="),
    (rotary, {"layout": "BSND"}, "layout"),
    (scatter, {"cache_mode": "PA_NZ"}, "PA_NZ"),
    (attention, {"input_layout": "BSND"}, "input_layout"),
    (attention, {"sparse_mode": 3, "atten_mask": zeros(2048, 2048, dtype=I8)}, "sparse_mode"),
    (attention, {"block_table": None}, "unpaged"),
    (attention, {"key": zeros(4, 2, 128, 64), "value": zeros(4, 2, 128, 64)}, "cache"),
    (format_cast, {"acl_format": 2}, "acl_format"),
    (gating, {"norm_type": 0}, "norm_type"),
    (gating, {"out_flag": True}, "out_flag"),
    (gating, {"group_select_mode": 0}, "group_select_mode"),
    (gating_softmax, {"finished": torch.zeros(4, dtype=torch.bool)}, "finished"),
    (routing, {"expert_tokens_num_type": 2}, "expert_tokens_num_type"),
    (routing, {"quant_mode": 1}, "quant_mode"),
    (routing, {"active_expert_range": [2, 8]}, "active_expert_range"),
    (routing, {"row_idx_type": 1}, "row_idx_type"),
    (grouped_matmul, {"weight": [zeros(32, 16)] * 3}, "lists"),
    (grouped_matmul, {"group_list_type": 0}, "group_list_type"),
    (grouped_matmul_int8, {"output_dtype": torch.float16}, "output_dtype"),
    (grouped_matmul_int8, {"scale": None}, "scales"),
    (unpermute, {"probs": None}, "probs"),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_unchanged_call_is_accepted(call: Callable[..., None]) -> None:
    call()


@pytest.mark.parametrize(("call", "change", "rule"), REJECTED, ids=lambda part: getattr(part, "__name__", None))
def test_a_broken_rule_is_named(call: Callable[..., None], change: dict[str, Any], rule: str) -> None:
    with pytest.raises(OpRuleError, match=rule) as caught:
        call(**change)
    assert str(caught.value).startswith(caught.value.op)


@pytest.mark.parametrize(("call", "change", "name"), UNMODELLED, ids=lambda part: getattr(part, "__name__", None))
def test_an_option_nobody_uses_is_refused(call: Callable[..., None], change: dict[str, Any], name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        call(**change)


def test_the_message_says_operator_rule_and_value() -> None:
    with pytest.raises(OpRuleError) as caught:
        quant_matmul(pertoken_scale=zeros(3, dtype=F32))
    assert str(caught.value) == ("npu_quant_matmul: pertoken_scale is float32 with shape [M=4]; given float32[3]")


@pytest.mark.sim
def test_torch_npu_alone_would_accept_most_of_these_calls(torch_npu: Any) -> None:
    """Why the rules are checked here: its meta kernels, which see shapes and dtypes, refuse few broken calls."""
    accepted = [rule for call, change, rule in REJECTED if _meta_kernel_accepts(torch_npu, call, change)]
    print(f"accepted: {len(accepted)} of {len(REJECTED)}")
    assert len(accepted) > len(REJECTED) / 2


def _meta_kernel_accepts(torch_npu: Any, call: Callable[..., None], change: dict[str, Any]) -> bool:
    """Send the same call to torch_npu, on meta tensors."""
    with pytest.MonkeyPatch.context() as patch:
        for name in twins.__all__:
            patch.setattr(twins, name, _on_meta(getattr(torch_npu, name)))
        try:
            call(**change)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
            return False
    return True


def _on_meta(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return kernel(*map(_to_meta, args), **{name: _to_meta(value) for name, value in kwargs.items()})

    return run


def _to_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_meta(one) for one in value]
    return value.to("meta") if isinstance(value, Tensor) else value
