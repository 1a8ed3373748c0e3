"""`mesh: auto`: how many of the processes share a layer (tp) and how many share the branches (bp).

A cost model of one step, from floors measured on this device: the weights of a rank read once or multiplied,
whichever takes longer, plus two sums a layer over tp, plus the gather over bp. The other numbers are those of
`lopa_cuda.machine`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.checkpoint import ModelConfig, fits_tensor_parallel
from common.config import DecodeConfig, MeshConfig
from common.runtime import num_matrix_weights, num_weights_read
from lopa_cuda.machine import MACHINE

logger = logging.getLogger(__name__)

NUM_BLOCKS = 2  # a usual window


@dataclass(frozen=True, slots=True)
class Estimate:
    mesh: MeshConfig
    step_s: float

    def __str__(self) -> str:
        mesh = self.mesh
        return f"bp{mesh.branch_parallel_size} tp{mesh.tensor_parallel_size} {self.step_s * 1e3:.2f} ms"


def choose_mesh(
    num_processes: int, config: ModelConfig, decode: DecodeConfig, bytes_per_weight: int, floors: dict[str, float]
) -> MeshConfig:
    """The mesh of this many processes with the shortest estimated step; says why."""
    estimates = [
        estimate(num_processes // tp, tp, config, decode, bytes_per_weight, floors)
        for tp in range(1, num_processes + 1)
        if num_processes % tp == 0 and fits_tensor_parallel(config, tp)
    ]
    best = min(estimates, key=lambda candidate: candidate.step_s)
    logger.info("mesh auto is %s: estimated steps are %s", best, ", ".join(map(str, estimates)))
    return best.mesh


def estimate(
    bp: int, tp: int, config: ModelConfig, decode: DecodeConfig, bytes_per_weight: int, floors: dict[str, float]
) -> Estimate:
    costs = MACHINE.mesh
    num_tokens = -(-(decode.num_lookahead + 1) // bp) * NUM_BLOCKS * decode.block_size
    read_s = num_weights_read(config, num_tokens) / tp * bytes_per_weight / floors["bytes_per_s"]
    multiply_s = 2 * num_matrix_weights(config) / tp * num_tokens / floors["flops_per_s"]
    step_s = max(read_s, multiply_s) / costs.efficiency + config.num_layers * costs.layer_overhead_s
    if tp > 1:
        sum_s = costs.sum_latency_s + 2 * num_tokens * config.hidden_size / costs.sum_bytes_per_s
        step_s += 2 * config.num_layers * sum_s
    return Estimate(
        MeshConfig(branch_parallel_size=bp, tensor_parallel_size=tp), step_s + (costs.gather_s if bp > 1 else 0.0)
    )
