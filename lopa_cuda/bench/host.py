"""What the CUDA engine's host does between a plan and its pass: the shapes are chosen and the buffers are filled."""

from __future__ import annotations

import time

import torch

from common.bench import HostSizes
from common.decoding import StepPlan, assign_rows
from common.processes import Mesh
from graphs.buckets import Buckets
from lopa_cuda.machine import MACHINE
from lopa_cuda.shapes import Shapes
from lopa_cuda.steps import LayersKey, StagedSlice, StepBuffers, Tiling


class Host:
    """`common.bench.EngineHost`; passes are those of Dream-7B's heads."""

    def __init__(self, sizes: HostSizes) -> None:
        most = sizes.rows_of_rank * sizes.longest
        buckets = Buckets(knee=MACHINE.knee_tokens, max_tokens=most, max_reads=most)
        self._mesh, self._tiling = Mesh(bp_size=sizes.num_ranks), Tiling(group=7, queries=64)
        self._shapes = Shapes(self._mesh, buckets, self._tiling, sizes.num_ranks * most, captures=True)
        self._buffers: dict[LayersKey, StepBuffers] = {}

    def launch(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        shares, key = self._shapes.arranged(plan, assign_rows(plan, self._mesh.bp_size))
        buffers = self._buffers.get(key) or self._allocate(key)
        buffers.fill(plan, shares[0])
        return time.perf_counter() - began

    def _allocate(self, key: LayersKey) -> StepBuffers:
        staged = StagedSlice(key.num_tokens, None)
        return self._buffers.setdefault(key, StepBuffers(key, torch.device("cpu"), self._tiling, staged))

    def commit(self) -> float:
        return 0.0
