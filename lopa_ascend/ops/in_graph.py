"""Attention in a GE graph, whose lengths are inputs: host tensors, so that they change from run to run and nothing is
compiled anew.

torch_npu's own call takes lists. torchair bakes them into the graph, or with dynamic shapes makes a symbol of every
number except 0 and 1, which it bakes in all the same; then it packs the symbols into the host tensor that this is from
the start. torchair.ops has a call that takes tensors, but on the device only, which serves tiling on the device, and
that excludes layout TND.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from common.errors import MissingCapability

_LIBRARY = torch.library.Library("lopa", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor query_ends, Tensor kv_lengths, "
    "Tensor block_table, int num_kv_heads, int page_size, float scale) -> Tensor"
)


@torch.library.register_fake("lopa::paged_attention", lib=_LIBRARY)
def _shape(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, kv_lengths: Tensor, block_table: Tensor,
    num_kv_heads: int, page_size: int, scale: float,
) -> Tensor:  # fmt: skip
    """softmax(scale * query @ keys) @ values of every virtual row, [T, N, H], inside of what torchair compiles.

    keys, values: the caches as the operator reads them. query_ends, kv_lengths: int64 [V] on the host.
    """
    attended: Tensor = torch.ops.lopa.paged_attention(
        query, keys, values, query_ends, kv_lengths, block_table, num_kv_heads, page_size, scale
    )
    return attended


def lower_attention() -> None:
    """Tell torchair how to lower it: by its own lowering of npu_fused_infer_attention_score_v2 with tensors.

    Raises MissingCapability where torchair cannot be loaded, or this lowering is not where 2.13.0 has it.
    """
    try:
        torchair = import_module("torchair")
    except ImportError as error:
        raise MissingCapability(
            f"torchair cannot be loaded ({error}): run `pip install -e '.[ascend]'`, or set graph.mode to npugraph_ex"
        ) from None
    try:
        import_module("torchair.ops._npu_fused_infer_attention_score_v2")
        convert = torch.ops.air.npu_fused_infer_attention_score_v2.default._ge_converter
    except (ImportError, AttributeError):
        raise MissingCapability(
            f"torch-npu {version('torch-npu')} hides torchair's lowering of attention: set graph.mode to npugraph_ex "
            "in the profile"
        ) from None

    def lowered(
        query: Any, keys: Any, values: Any, query_ends: Any, kv_lengths: Any, block_table: Any, num_kv_heads: int,
        page_size: int, scale: float, meta_outputs: Any = None,
    ) -> Any:  # fmt: skip
        attended, _ = convert(
            query, keys, values, actual_seq_qlen=query_ends, actual_seq_kvlen=kv_lengths, block_table=block_table,
            num_query_heads=query.symsize[1], num_key_value_heads=num_kv_heads, softmax_scale=scale,
            input_layout="TND", sparse_mode=0, block_size=page_size,
        )  # fmt: skip
        return attended

    torchair.register_fx_node_ge_converter(torch.ops.lopa.paged_attention.default)(lowered)
