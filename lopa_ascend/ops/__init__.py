"""Every Ascend operation the engine performs, behind one interface with two lanes: torch_npu, and CPU twins."""

from lopa_ascend.ops.facade import AttentionVersion, Normed, Ops, Projections, Quantized, QuantizedNorm
from lopa_ascend.ops.npu import (
    keep_kv_writes_in_place,
    load_torch_npu,
    npu_ops,
    num_visible_devices,
    require_devices,
)
from lopa_ascend.ops.reference import reference_ops
from lopa_ascend.ops.rows import QueryGroups, VirtualRows, group_queries
from lopa_ascend.ops.rules import OpRuleError

__all__ = [
    "AttentionVersion",
    "Normed",
    "OpRuleError",
    "Ops",
    "Projections",
    "Quantized",
    "QuantizedNorm",
    "QueryGroups",
    "VirtualRows",
    "group_queries",
    "keep_kv_writes_in_place",
    "load_torch_npu",
    "npu_ops",
    "num_visible_devices",
    "reference_ops",
    "require_devices",
]
