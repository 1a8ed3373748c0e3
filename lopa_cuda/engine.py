"""The CUDA engine, which also runs on CPU: rows are dealt over the bp axis, and the winner's KV is copied.

With full attention and several branch ranks the winner's owner broadcasts the committed spans first (Pre-Write, then
Commit-Winner-Cache).
"""

from __future__ import annotations

from typing import Any

from common.checkpoint import ModelConfig
from common.config import DecodeConfig
from common.decoding import Capacity, PassCosts
from common.processes import Mesh
from common.runtime import DeviceEngine
from lopa_cuda.budget import measure_passes
from lopa_cuda.passes import CudaPasses
from lopa_cuda.steps import Committer, PagedKVCache


class CudaEngine(DeviceEngine):
    name = "lopa_cuda"
    passes: CudaPasses
    kv: Committer
    cache: PagedKVCache

    def __init__(
        self, passes: CudaPasses, cache: PagedKVCache, capacity: Capacity, mesh: Mesh, config: ModelConfig,
        details: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(passes, passes.committer, cache, capacity, mesh, details)
        self._config = config

    def measure_passes(self, decode: DecodeConfig) -> PassCosts:
        """Collective over all ranks."""
        try:
            return measure_passes(self.passes, self._config, decode, self.capacity.num_slots, self.mesh.bp_size)
        except RuntimeError as error:
            raise self._failed(error) from error
