"""The CUDA engine's fused stages: the decoder layer's pieces as Triton kernels, called by lopa_cuda.ops.

    embed -> [ norm -> linear qkv -> rope_prewrite -> attention -> linear o -> norm -> gate_up + SwiGLU -> linear down ] x L
          -> norm -> head -> head_statistics -> merge_statistics

Every function works on device tensors alone: no host synchronisation, grids from shapes only, so that it can be captured
in a CUDA graph and replayed for any lengths and positions. Results are new tensors.

This first version states the interface on plain operators; the kernels replace the bodies one by one.

Shapes: T tokens (R rows of W entries, flattened), D model width, N query heads, K KV heads, H head size, I MLP width,
V vocabulary, Z split-K parts, E output channels.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from common.models.ops import rms_norm, rotate
from common.models.ops import swiglu as plain_swiglu
from common.plan import Sampling
from common.sampling import merge_statistics as plain_merge_statistics
from common.sampling import shard_statistics
from quant import fp8, w8a8
from quant.w8a8 import QuantizedActivation

Quantize = Literal["int8", "fp8"]


class Partials(NamedTuple):
    """A linear's output before the sum over its split-K parts: y = sum_Z(values) * weight_scale * x_scale + bias.

    Only `add_rms_norm`, `rope_prewrite` and `sum_partials` read it. values: [Z, T, E] fp32, or int32 from int8 operands.
    """

    values: Tensor
    weight_scale: Tensor | None  # fp32 [E]
    x_scale: Tensor | None  # fp32 [T]
    bias: Tensor | None  # [E]; int32 is added before the scales


def linear(
    x: Tensor | QuantizedActivation, weight: Tensor, bias: Tensor | None = None, weight_scale: Tensor | None = None
) -> Tensor:
    """x [T, K'] @ weight [E, K'].T + bias -> bf16 [T, E].

    bf16: a Tensor and a bf16 weight. int8 and fp8 (e4m3): a QuantizedActivation, the weight in that dtype and its
    weight_scale [E]; a static int8 linear passes QuantizedActivation(values, None), deq_scale and an int32 bias.
    """
    if isinstance(x, QuantizedActivation):
        multiply = w8a8.linear if weight.dtype == torch.int8 else fp8.linear
        return multiply(x.values, weight, weight_scale, x.scale, bias, torch.bfloat16)
    return functional.linear(x, weight, bias)


def linear_partials(
    x: Tensor | QuantizedActivation, weight: Tensor, bias: Tensor | None = None, weight_scale: Tensor | None = None
) -> Tensor | Partials:
    """`linear` for a consumer that adds the split-K parts itself (norm, rope). A Tensor where the library is faster."""
    return linear(x, weight, bias, weight_scale)


def sum_partials(partials: Tensor | Partials) -> Tensor:
    """bf16 [T, E]; a Tensor passes through. For a consumer that needs the sum, such as an all_reduce."""
    assert isinstance(partials, Tensor)
    return partials


def gate_up_swiglu(
    x: Tensor | QuantizedActivation,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    *,
    quantize: Quantize | None = None,
) -> Tensor | QuantizedActivation:
    """silu(x @ gate.T) * (x @ up.T), weight = gate over up [2 I, D] -> [T, I] in bf16 or quantized per token."""
    return swiglu(linear(x, weight, None, weight_scale), quantize=quantize)


def add_rms_norm(
    x: Tensor | Partials,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    *,
    quantize: Quantize | None = None,
    prefetch: Tensor | None = None,
) -> tuple[Tensor | QuantizedActivation, Tensor]:
    """(RMS norm of x + residual, x + residual in bf16), [T, D] both; the norm optionally quantized per token.

    prefetch: the weight of the next linear, pulled into L2 meanwhile; give it where the library runs that linear.
    """
    x_TD = sum_partials(x)
    summed_TD = x_TD if residual_TD is None else x_TD + residual_TD
    normed_TD = rms_norm(summed_TD, weight_D, eps)
    return (normed_TD if quantize is None else quantize_per_token(normed_TD, quantize)), summed_TD


def rope_prewrite(
    qkv: Tensor | Partials,
    position_T: Tensor,
    rotary_P2F: Tensor,
    window_2RWKH: Tensor,
    *,
    num_heads: int,
    width: int,
    prefetch: Tensor | None = None,
) -> Tensor:
    """Rotate q and k, write k and v into the window cache, return q [T, N, H].

    qkv: [T, (N + 2 K) H] with its bias added (or Partials that carry it). rotary: common.models.ops.rotary_table.
    window: one layer of the window cache; its rows and entries may exceed R and width. position: int32 or int64.
    """
    qkv_TE = sum_partials(qkv)
    num_kv_heads, size = window_2RWKH.shape[-2:]
    qkv_TGH = qkv_TE.view(qkv_TE.shape[0], -1, size)
    rotated_TGH = rotate(qkv_TGH[:, : num_heads + num_kv_heads], rotary_P2F[position_T])
    num_rows = qkv_TE.shape[0] // width
    shape = num_rows, width, num_kv_heads, size
    window_2RWKH[0, :num_rows, :width] = rotated_TGH[:, num_heads:].view(shape)
    window_2RWKH[1, :num_rows, :width] = qkv_TGH[:, num_heads + num_kv_heads :].view(shape)
    return rotated_TGH[:, :num_heads].contiguous()


def window_attention(
    q_TNH: Tensor,
    committed_2SPKH: Tensor,
    window_2RWKH: Tensor,
    *,
    slot_R: Tensor,
    start_R: Tensor,
    num_keys_R: Tensor,
    cached_R: Tensor,
    horizon_RW: Tensor,
    num_splits: int | None = None,
    quantize: Quantize | None = None,
    prefetch: Tensor | None = None,
) -> Tensor | QuantizedActivation:
    """Attention of every row's queries over [its slot's committed keys | its own window]; [T, N H], bf16 or quantized.

    Visible keys: committed positions below start or in [start + num_keys, cached); own window keys j < num_keys with
    start + j < horizon (lopa_cuda.ops.visible_keys). A query that sees no key gives 0. The rows' tensors are int32 or
    int64 on the device. num_splits: parts of the key range computed in parallel; None chooses by shape.
    """
    from lopa_cuda.ops import visible_keys

    num_rows, width = horizon_RW.shape
    num_cached = int(cached_R.max())
    mask_R1WX = visible_keys(horizon_RW, start_R, num_keys_R, cached_R, num_cached)
    key, value = (
        torch.cat((committed_2SPKH[i][slot_R, :num_cached], window_2RWKH[i, :num_rows, :width]), dim=1) for i in (0, 1)
    )
    query = q_TNH.view(num_rows, width, *q_TNH.shape[1:])
    attended_RNWH = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask_R1WX, enable_gqa=True
    )
    attended = attended_RNWH.nan_to_num().transpose(1, 2).reshape(num_rows * width, -1)
    return attended if quantize is None else quantize_per_token(attended, quantize)


def swiglu(
    gate_up_TI: Tensor, *, quantize: Quantize | None = None, prefetch: Tensor | None = None
) -> Tensor | QuantizedActivation:
    """silu(first half) * second half of [T, 2 I] -> [T, I], bf16 or quantized per token."""
    y_TI = plain_swiglu(gate_up_TI)
    return y_TI if quantize is None else quantize_per_token(y_TI, quantize)


def quantize_per_token(x_TD: Tensor, kind: Quantize) -> QuantizedActivation:
    """quant.w8a8.quantize_per_token ("int8") or quant.fp8.quantize_per_token ("fp8")."""
    return w8a8.quantize_per_token(x_TD) if kind == "int8" else fp8.quantize_per_token(x_TD)


def head_statistics(logits_NV: Tensor, vocab_start: int, mask_token_id: int) -> Tensor:
    """common.sampling.shard_statistics in one pass over bf16 logits: fp32 [N, 6]; ties go to the lower id.

    vocab_start: id of the shard's first column. The logits are not changed.
    """
    return shard_statistics(logits_NV, vocab_start, Sampling("default", mask_token_id))


def merge_statistics(statistics_PN6: Tensor, strategy: Literal["default", "margin", "neg_entropy"]) -> Tensor:
    """common.sampling.merge_statistics in one launch: [P, N, 6] of P vocabulary shards -> fp32 [N, 3]."""
    return plain_merge_statistics(statistics_PN6, strategy)
