"""FRACTAL_NZ tensors: values stay plain here, but what a device could not do with their layout is refused."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lopa_ascend.ops import OpRuleError
from sim.calls import Call

FRACTAL_NZ = 29
_MAY_READ = {
    "aten::alias",
    "aten::detach",
    "aten::is_same_size",
    "aten::lift_fresh",
    "npu::get_npu_format",
    "npu::npu_format_cast",
    "npu::npu_grouped_matmul_swiglu_quant_v2",
    "npu::npu_prefetch",
    "npu::npu_quant_matmul",
    "aten::_to_copy",
}


_WANTS_NZ = "npu::npu_grouped_matmul_swiglu_quant_v2"


class NzStorages:
    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> None:
        self._references[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())

    def __contains__(self, tensor: Tensor) -> bool:
        key = tensor.untyped_storage()._cdata if self._references else None
        reference = self._references.get(key) if key is not None else None
        if reference is not None and reference.expired():
            del self._references[key]
            return False
        return reference is not None

    def check(self, call: Call) -> None:
        if call.name == _WANTS_NZ and not any(tensor in self for tensor in call.npu):
            raise OpRuleError(call.name, "the weight is in FRACTAL_NZ", call.npu[1])
        if not self._references or call.name in _MAY_READ:
            return
        for tensor in call.npu:
            if tensor in self:
                rule = "a FRACTAL_NZ tensor is not viewed, sliced, written or computed with; cast last"
                raise OpRuleError(call.name, rule, tensor)


NZ = NzStorages()
