"""The model of this engine: what `common.runtime.load` makes, and its linears handed to the operators."""

from __future__ import annotations

import torch

from common.checkpoint import ModelConfig
from common.config import DeviceProfile, RunConfig
from common.model import Dream
from common.processes import Mesh
from common.runtime import ModelLoader
from lopa_cuda.ops import CudaOps


def load_model(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, ops: CudaOps, mesh: Mesh, device: torch.device
) -> Dream:
    """Raises ConfigError, or QuantizationError naming file and tensor."""
    model = ModelLoader(profile, run, config, config, ops, mesh, device).load()
    ops.adopt(model)
    return model
