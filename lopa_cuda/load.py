"""The model of this engine: what `common.runtime.load` makes, before there are operators.

Operators need the KV cache, and the cache is sized by the memory that the weights leave.
"""

from __future__ import annotations

from typing import Any

import torch

from common.checkpoint import ModelConfig
from common.config import DeviceProfile, RunConfig
from common.model import Decoder
from common.processes import Mesh
from common.runtime import ModelLoader
from lopa_cuda.ops import CudaOps


def load_model(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, mesh: Mesh, device: torch.device
) -> Decoder:
    """Raises ConfigError, or QuantizationError naming file and tensor."""
    no_ops_yet: Any = None
    return ModelLoader(profile, run, config, config, no_ops_yet, mesh, device).load()


def attach(ops: CudaOps, model: Decoder) -> None:
    """From here on the model computes with these."""
    model.ops = ops
    ops.adopt(model)
