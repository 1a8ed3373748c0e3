"""Which twin executes which npu:: operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lopa_ascend.ops import OpRuleError, twins

# The dispatcher passes a dtype as its number.
_DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 12: torch.qint8, 15: torch.bfloat16}
_DTYPE_OPTIONS = ("dtype", "output_dtype")
_ATTENTION = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")


def execute(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator on cpu tensors. Raises NotImplementedError for what no twin models."""
    operator = name.removeprefix("npu::").removeprefix("atb::")
    special = _special().get(operator)
    if special is not None:
        return special(*args, **kwargs)
    if operator not in twins.__all__:
        raise NotImplementedError(f"{name} has no twin in lopa_ascend.ops.twins")
    return _call(getattr(twins, operator), operator, args, kwargs)


def _call(twin: Callable[..., Any], operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    signature = inspect.signature(twin)
    unknown = kwargs.keys() - signature.parameters.keys()
    if unknown or len(args) > len(signature.parameters):
        raise NotImplementedError(f"{operator}: the twin does not model {sorted(unknown) or 'so many arguments'}")
    bound = signature.bind(*args, **kwargs).arguments
    for option in _DTYPE_OPTIONS:
        if isinstance(bound.get(option), int):
            bound[option] = _DTYPES[bound[option]]
    return twin(**bound)


@cache
def _special() -> dict[str, Callable[..., Any]]:
    """Forms of an operator that the engine's code does not name, but torch_npu's graph machinery does."""
    table: dict[str, Callable[..., Any]] = {
        "npu_apply_rotary_pos_emb": _rotate,
        "npu_scatter_pa_kv_cache_functional": _scatter_into_copies,
        "_npu_moe_token_unpermute": _unpermute,
        "npu_add_rms_norm_cast": _norm_and_cast,
    }
    for operator in _ATTENTION:
        table[f"{operator}.out"] = _writing_into(operator)
        table[f"_{operator}_get_max_workspace"] = _workspace
        table[f"_{operator}_infer_output"] = _infer_output
    return table


def _rotate(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Overwrites its inputs, as documented, and returns other tensors, as its schema says: neither may be relied on."""
    rotated = _call(twins.npu_apply_rotary_pos_emb, "npu_apply_rotary_pos_emb", (query, key, *args), kwargs)
    return rotated[0].clone(), rotated[1].clone()


def _scatter_into_copies(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    copies = key_cache.clone(), value_cache.clone()
    _call(twins.npu_scatter_pa_kv_cache, "npu_scatter_pa_kv_cache", (key, value, *copies, slot_mapping), kwargs)
    return copies


def _norm_and_cast(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What npugraph_ex makes of a norm whose result is cast to float32, as the router's is: both forms of it. Whether
    the device rounds before the cast only a device can say."""
    normed, inverse_rms, total = _call(twins.npu_add_rms_norm, "npu_add_rms_norm", args, kwargs)
    return normed.float(), normed, inverse_rms, total


def _unpermute(permuted_tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """What torch_npu's npu_moe_token_unpermute calls; the tokens come back for a backward pass."""
    given = permuted_tokens, *args
    mixed = _call(twins.npu_moe_token_unpermute, "npu_moe_token_unpermute", given, kwargs)
    return mixed, permuted_tokens.clone()


def _writing_into(operator: str) -> Callable[..., Any]:
    def run(*args: Any, out: list[Tensor], workspace: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        attended, _ = _call(getattr(twins, operator), operator, args, kwargs)
        if (out[0].shape, out[0].dtype) != (attended.shape, attended.dtype):
            raise OpRuleError(f"{operator}.out", f"out[0] is {list(attended.shape)}", out[0])
        out[0].copy_(attended)
        return out[0], out[1]

    return run


def _workspace(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return query.new_zeros(16)


def _infer_output(query: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(query), torch.zeros(0)
