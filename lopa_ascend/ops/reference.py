"""The `ref` lane: the same operations on any machine, computed by the CPU twins. Never imports torch_npu."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from lopa_ascend.ops import twins
from lopa_ascend.ops.facade import Ops
from lopa_ascend.ops.results import USUAL_ATTENTION, AttentionForm

# Operators whose rules include what the silicon can compute with: float dtypes, head sizes, sizes of groups.
_TYPED = (
    "npu_add_rms_norm_dynamic_quant",
    "npu_apply_rotary_pos_emb",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_quant",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_grouped_matmul",
    "npu_moe_gating_top_k",
    "npu_quant_matmul",
)


def reference_ops(*, hardware_types: bool = True, attention: AttentionForm = USUAL_ATTENTION) -> Ops:
    """Operations on CPU tensors, all documented rules checked.

    hardware_types=False also takes float32, any head size and groups of two experts, so that small float32 models can
    be replayed; every other rule stays.
    """
    kernels = {name: getattr(twins, name) for name in twins.__all__}
    for name in _TYPED:
        kernels[name] = partial(kernels[name], hardware_types=hardware_types)
    return Ops(SimpleNamespace(**kernels), attention)
