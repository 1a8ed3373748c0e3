"""Twins of what mixtures of experts call: gating, rows sorted by expert, a product per expert, and the weighted sum.

Shapes: T tokens, D model width, E experts, C chosen experts of a token, N = T * C rows, sorted by expert, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model import best_columns
from lopa_ascend.ops.rules import refuse, require
from lopa_ascend.ops.twins.quant import int8_matmul

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MOST_GATED, _MOST_ROUTED, _MOST_GROUPS = 2048, 10240, 1024
_MOST_SOFTMAX_CHOSEN, _MOST_COMBINED = 1024, 512
_INNER_LIMIT = 65536


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    hardware_types: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, C], experts int32 [T, C], unused): sigmoid(x) over the sum of those chosen. bias joins in choosing.

    Equal scores go to the lower id; the documentation does not say so.
    """
    op = "npu_moe_gating_top_k"
    _check_scores(op, x)
    num_experts = x.shape[1]
    require(num_experts <= _MOST_GATED, op, f"there are at most {_MOST_GATED} experts", num_experts)
    _check_groups(op, num_experts, (k, k_group, group_count), hardware_types)
    if bias is not None:
        fits = bias.dtype == x.dtype and tuple(bias.shape) == (num_experts,)
        require(fits, op, f"bias has x's dtype and shape [{num_experts}]", bias)
    require(renorm == 0, op, "renorm is 0", renorm)
    is_by_maximum = group_count > 1 and group_select_mode == 0
    refuse(op, norm_type=None if norm_type == 1 else norm_type, out_flag=out_flag, group_select_mode=is_by_maximum)
    scores_TE = x.float().sigmoid()
    choice_TE = scores_TE if bias is None else scores_TE + bias.float()
    if group_count > 1:
        choice_TGE = choice_TE.view(len(x), group_count, -1)
        best_TG = best_columns(choice_TGE.topk(2, dim=-1).values.sum(dim=-1), k_group)
        is_out_TG = torch.ones(choice_TGE.shape[:2], dtype=torch.bool).scatter_(1, best_TG, False)
        choice_TE = choice_TGE.masked_fill(is_out_TG[:, :, None], -torch.inf).flatten(1)
    expert_TC = best_columns(choice_TE, k)
    weight_TC = scores_TE.gather(1, expert_TC)
    weight_TC = weight_TC / (weight_TC.sum(dim=-1, keepdim=True) + eps) * routed_scaling_factor
    return weight_TC.to(x.dtype), expert_TC.int(), x.new_empty(x.shape, dtype=torch.float32)


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax(x) of the chosen [T, C], experts int32 [T, C], row numbers by column int32 [T, C])."""
    op = "npu_moe_gating_top_k_softmax"
    _check_scores(op, x)
    refuse(op, finished=finished)
    require(0 < k <= min(x.shape[1], _MOST_SOFTMAX_CHOSEN), op, f"k is 1 to {_MOST_SOFTMAX_CHOSEN} of the experts", k)
    scores_TE = x.float().softmax(dim=-1)
    expert_TC = best_columns(scores_TE, k)
    row_TC = torch.arange(len(x) * k, dtype=torch.int32).view(k, len(x)).t().contiguous()
    return scores_TE.gather(1, expert_TC).to(x.dtype), expert_TC.int(), row_TC


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows of x by expert [N, D], the place of row token * C + choice among them int32 [N], each expert's number of
    rows int64 [E], scale of each row [N])."""
    op = "npu_moe_init_routing_v2"
    require(x.dim() == 2 and x.dtype in (*_FLOATS, torch.int8), op, "x is [T, D] of floats or int8", x)
    fits = expert_idx.dim() == 2 and expert_idx.dtype == torch.int32 and len(expert_idx) == len(x)
    require(fits, op, f"expert_idx is int32 [{len(x)}, C]", expert_idx)
    num_rows, num_chosen = expert_idx.numel(), expert_idx.shape[1]
    require(active_num == num_rows, op, f"active_num is T * C = {num_rows}", active_num)
    require(0 <= expert_num <= _MOST_ROUTED, op, f"expert_num is at most {_MOST_ROUTED}", expert_num)
    require(drop_pad_mode == 0, op, "drop_pad_mode is 0", drop_pad_mode)
    require(expert_tokens_num_type in (1, 2), op, "expert_tokens_num_type is 1 or 2", expert_tokens_num_type)
    require(expert_tokens_num_flag, op, "expert_tokens_num_flag is True", expert_tokens_num_flag)
    require(quant_mode in (-1, 1), op, "quant_mode is -1 or 1", quant_mode)
    inside = num_rows == 0 or (int(expert_idx.min()) >= 0 and int(expert_idx.max()) < expert_num)
    require(inside, op, f"experts lie in [0, {expert_num - 1}]", expert_idx)
    is_part = tuple(active_expert_range) != (0, expert_num)
    refuse(op, expert_tokens_num_type=expert_tokens_num_type == 2, quant_mode=quant_mode == 1)
    refuse(op, active_expert_range=list(active_expert_range) if is_part else None, row_idx_type=row_idx_type or None)
    if scale is not None:
        fits = scale.dtype == torch.float32 and tuple(scale.shape) == (len(x),)
        require(fits, op, f"scale is float32 with shape [{len(x)}] where nothing is quantized", scale)
    order_N = expert_idx.flatten().sort(stable=True).indices
    place_N = torch.empty(num_rows, dtype=torch.int32)
    place_N[order_N] = torch.arange(num_rows, dtype=torch.int32)
    token_N = order_N // num_chosen
    scale_N = torch.empty(num_rows) if scale is None else scale[token_N]
    return x[token_N], place_N, torch.bincount(expert_idx.flatten().long(), minlength=expert_num), scale_N


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: torch.dtype | None = None,
    hardware_types: bool = True,
) -> list[Tensor]:
    """[x of group e @ weight[e]] with one tensor each: x [N, K], weight [E, K, O]. int8 gives int32, or bfloat16 with
    both scales."""
    op = "npu_grouped_matmul"
    refuse(op, lists=(len(x), len(weight)) if len(x) != 1 or len(weight) != 1 else None)
    (rows,), (matrices,) = x, weight
    are_one = rows.dim() == 2 and matrices.dim() == 3
    require(are_one, op, "x is 2-D and weight 3-D with one tensor each", (rows, matrices))
    require(rows.shape[1] == matrices.shape[1], op, "x is [N, K] and weight [E, K, O]", (rows, matrices))
    require(rows.dtype == matrices.dtype, op, "x and weight have one dtype", (rows, matrices))
    require(rows.dtype in (*_FLOATS, torch.int8) and rows.numel() > 0, op, "x is of floats or int8, not empty", rows)
    inner = max(rows.shape[1], matrices.shape[2])
    require(inner < _INNER_LIMIT, op, f"last dimensions are below {_INNER_LIMIT}", inner)
    require(split_item in (2, 3), op, "split_item is 2 or 3 for one result", split_item)
    require(group_type == 0, op, "group_type is 0 for one weight tensor", group_type)
    refuse(op, group_list_type=None if group_list_type == 1 else str(group_list_type))
    counts = _check_counts(op, group_list, len(rows), len(matrices))
    is_small = output_dtype == torch.float32 and not hardware_types
    is_unknown = rows.dtype == torch.int8 and output_dtype not in (torch.int32, torch.bfloat16) and not is_small
    refuse(op, output_dtype=f"{output_dtype}" if is_unknown else None)
    scales = _check_product(op, rows, matrices, scale, per_token_scale, output_dtype)
    multiply = int8_matmul if rows.dtype == torch.int8 else torch.matmul
    groups = zip(rows.split(counts), matrices, strict=True)
    product = torch.cat([multiply(group, matrix) for group, matrix in groups if len(group)])
    if scales is None:
        return [product]
    scale_EO, scale_N = scales
    of_row_NO = scale_EO.float().repeat_interleave(torch.tensor(counts), dim=0)
    return [(product.float() * of_row_NO * scale_N[:, None]).to(output_dtype or torch.bfloat16)]


def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None) -> Tensor:
    """[T, D]: the sum over choices of permuted_tokens[sorted_indices[token * C + choice]] * probs[token, choice]."""
    op = "npu_moe_token_unpermute"
    fits = permuted_tokens.dim() == 2 and permuted_tokens.dtype in _FLOATS
    require(fits, op, "tokens are [N, D] floats", permuted_tokens)
    num_rows, width = permuted_tokens.shape
    fits = sorted_indices.dtype == torch.int32 and tuple(sorted_indices.shape) == (num_rows,)
    require(fits, op, f"sorted_indices is int32 with shape [{num_rows}]", sorted_indices)
    is_each = torch.equal(sorted_indices.sort().values, torch.arange(num_rows, dtype=torch.int32))
    require(is_each, op, f"sorted_indices holds each of 0 to {num_rows - 1} once", sorted_indices)
    refuse(op, probs="None" if probs is None else None)
    assert probs is not None
    require(probs.dtype in _FLOATS and probs.dim() == 2, op, "probs is [T, C] of floats", probs)
    require(probs.numel() == num_rows, op, f"probs has {num_rows} values", probs)
    require(probs.shape[1] <= _MOST_COMBINED, op, f"there are at most {_MOST_COMBINED} choices a token", probs)
    rows_TCD = permuted_tokens[sorted_indices.long()].float().view(*probs.shape, width)
    return (rows_TCD * probs.float()[:, :, None]).sum(dim=1).to(permuted_tokens.dtype)


def _check_scores(op: str, x: Tensor) -> None:
    require(x.dtype in _FLOATS, op, "x is float16, bfloat16 or float32", x)
    require(x.dim() == 2, op, "x is [T, E]", x)


def _check_groups(op: str, num_experts: int, sizes: tuple[int, int, int], hardware_types: bool) -> None:
    k, k_group, group_count = sizes
    require(group_count > 0 and num_experts % group_count == 0, op, "group_count divides the experts", group_count)
    size = num_experts // group_count
    require(size > 2 or not hardware_types, op, "a group has more than two experts", size)
    aligned = -(-size // 32) * 32 * group_count
    require(aligned <= _MOST_GATED, op, f"groups rounded up to 32 experts are at most {_MOST_GATED} together", aligned)
    require(1 <= k_group <= group_count, op, f"k_group is 1 to {group_count}", k_group)
    require(1 <= k <= k_group * size, op, f"k is at most {k_group * size}, the experts of the chosen groups", k)


def _check_counts(op: str, group_list: Tensor | None, num_rows: int, num_groups: int) -> list[int]:
    require(group_list is not None, op, "one weight tensor needs a group_list", group_list)
    assert group_list is not None
    fits = group_list.dtype == torch.int64 and tuple(group_list.shape) == (num_groups,)
    require(fits, op, f"group_list is int64 with shape [{num_groups}]", group_list)
    require(1 < num_groups <= _MOST_GROUPS, op, f"counts are of 2 to {_MOST_GROUPS} groups", num_groups)
    counts: list[int] = group_list.tolist()
    is_whole = min(counts) >= 0 and sum(counts) == num_rows
    require(is_whole, op, f"counts are not negative and sum up to the {num_rows} rows of x", counts)
    return counts


def _check_product(
    op: str, rows: Tensor, matrices: Tensor, scale: Sequence[Tensor] | None, per_token_scale: Sequence[Tensor] | None,
    output_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """The scales of int8 rows, if any."""
    if rows.dtype != torch.int8:
        require(output_dtype in (None, rows.dtype), op, "output_dtype is that of x", output_dtype)
        require(scale is None and per_token_scale is None, op, "floats take no scale", (scale, per_token_scale))
        return None
    if output_dtype == torch.int32:
        require(scale is None and per_token_scale is None, op, "int32 output takes no scale", (scale, per_token_scale))
        return None
    refuse(op, scales="one of two" if scale is None or per_token_scale is None else None)
    assert scale is not None and per_token_scale is not None
    wanted = len(matrices), matrices.shape[2]
    fits = scale[0].dtype == torch.bfloat16 and tuple(scale[0].shape) == wanted
    require(fits, op, f"scale is bfloat16 with shape {list(wanted)} for bfloat16 output", scale[0])
    fits = per_token_scale[0].dtype == torch.float32 and tuple(per_token_scale[0].shape) == (len(rows),)
    require(fits, op, f"per_token_scale is float32 with shape [{len(rows)}]", per_token_scale[0])
    return scale[0], per_token_scale[0]
