"""The Ascend engine: under block-causal attention no KV moves when it is committed, neither on the device nor between
ranks.

What a step's commits do to the pages does not depend on the winner, so the host works it out while the device computes,
and `commit` only puts the prepared pages in force.
"""

from __future__ import annotations

from typing import Any

from common.decoding import Capacity
from common.processes import Mesh
from common.runtime import DeviceEngine
from lopa_ascend.floors import measure_npu_floors
from lopa_ascend.kv import PageBook, PagedKVCache
from lopa_ascend.ops import Ops
from lopa_ascend.passes import AscendPasses


class AscendEngine(DeviceEngine):
    name = "lopa_ascend"
    passes: AscendPasses
    kv: PageBook
    cache: PagedKVCache

    def __init__(
        self, passes: AscendPasses, kv: PageBook, cache: PagedKVCache, capacity: Capacity, mesh: Mesh, ops: Ops,
        details: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(passes, kv, cache, capacity, mesh, details)
        self._ops = ops

    def measure_floors(self) -> dict[str, float]:
        return measure_npu_floors(self._ops, self.passes.device, self.cache.dtype)
