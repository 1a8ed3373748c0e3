"""Every Ascend operation the engine performs, behind one interface with two lanes: torch_npu, and CPU twins."""

from lopa_ascend.ops.experts import Dispatched, of_own_experts
from lopa_ascend.ops.facade import Ops
from lopa_ascend.ops.fused_kv import require_triton
from lopa_ascend.ops.in_graph import lower_attention
from lopa_ascend.ops.npu import (
    keep_kv_writes_in_place,
    load_torch_npu,
    npu_ops,
    num_visible_devices,
    open_device,
    require_devices,
)
from lopa_ascend.ops.reference import reference_ops
from lopa_ascend.ops.results import USUAL_ATTENTION, AttentionForm, AttentionVersion, HeadNorms, Quantized
from lopa_ascend.ops.rows import VirtualRows, group_queries
from lopa_ascend.ops.rules import OpRuleError
from lopa_ascend.ops.side_stream import lower_prefetch
from lopa_ascend.ops.twins.activations import WIDEST_GATE_UP

__all__ = [
    "USUAL_ATTENTION",
    "WIDEST_GATE_UP",
    "AttentionForm",
    "AttentionVersion",
    "Dispatched",
    "HeadNorms",
    "OpRuleError",
    "Ops",
    "Quantized",
    "VirtualRows",
    "group_queries",
    "keep_kv_writes_in_place",
    "load_torch_npu",
    "lower_attention",
    "lower_prefetch",
    "npu_ops",
    "num_visible_devices",
    "of_own_experts",
    "open_device",
    "reference_ops",
    "require_devices",
    "require_triton",
]
