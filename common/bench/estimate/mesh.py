"""`mesh: auto` of `lopa_cuda`: of the processes that were started, the mesh whose step is estimated the shortest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from common.bench.estimate.cost import StepCost, estimate_step
from common.bench.estimate.hardware import Hardware, load_hardware
from common.bench.estimate.scenario import Options, meshes, setup_of
from common.checkpoint import ModelConfig
from common.config import DeviceProfile, MeshConfig, RunConfig

logger = logging.getLogger(__name__)

_NUM_BLOCKS = 2  # of a usual window, over all of a request's steps


def fastest_mesh(
    profile: DeviceProfile, run: RunConfig, model: ModelConfig, num_processes: int, floors: Mapping[str, float]
) -> MeshConfig:
    """Return the mesh and log every candidate's estimate. floors: what `common.runtime.measure_floors` measured here;
    the rest is an H200's, as nothing else has been measured."""
    whole = profile.model_copy(update={"mesh": MeshConfig(branch_parallel_size=num_processes)})
    setup = setup_of(whole, run, model, Options(window=_NUM_BLOCKS * run.decode.block_size))
    hardware = _with_floors(load_hardware("h200"), floors, profile.dtype)
    steps = [estimate_step(candidate, hardware) for candidate in meshes(setup)]
    best = min(steps, key=lambda step: step.ms)
    logger.info("mesh auto is %s: estimated steps are %s", _told(best), ", ".join(map(_told, steps)))
    return MeshConfig(branch_parallel_size=best.setup.bp, tensor_parallel_size=best.setup.tp)


def _with_floors(hardware: Hardware, floors: Mapping[str, float], dtype: str) -> Hardware:
    """The same with this device's own copy and product of `dtype`; 8 bits are as much faster than that as there."""
    usual, share = hardware.matrix_tflops["bfloat16"], hardware.linear_memory_share["bfloat16"]
    tflops = floors["flops_per_s"] / 1e12
    scaled = {
        name: figure.model_copy(update={"value": figure.value * tflops / usual.value})
        for name, figure in hardware.matrix_tflops.items()
    }
    own: dict[str, Any] = {
        "memory_tb_s": hardware.memory_tb_s.model_copy(update={"value": floors["bytes_per_s"] / 1e12}),
        "matrix_tflops": {dtype: scaled["bfloat16"], **scaled},
        "linear_memory_share": {dtype: share, **hardware.linear_memory_share},
    }
    return hardware.model_copy(update=own)


def _told(step: StepCost) -> str:
    return f"bp{step.setup.bp} tp{step.setup.tp} {step.ms:.2f} ms"
