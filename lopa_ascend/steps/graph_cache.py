"""Where compiled graphs are kept across starts, so that a later one need not trace and compile every shape again.

What torch_npu finds in its cache it runs without a check. So the folder's name is a digest of all that a graph was
made from beside its shape: versions, the sources of the packages that are traced, the model's and the mesh's sizes, how
weights are stored, whether they are prefetched and how attention is called. Weights are not in the graphs.
"""

from __future__ import annotations

import hashlib
import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import ModelConfig
from common.config import DeviceProfile
from common.processes import resolve_mesh
from lopa_ascend.ops import Ops, load_torch_npu
from lopa_ascend.ops.npu import cann_version

logger = logging.getLogger(__name__)

_TRACED = ("common", "graphs", "quant", "lopa_ascend")


def folder_of(profile: DeviceProfile, config: ModelConfig, ops: Ops) -> Path | None:
    """The folder of this model and these settings, below the profile's npu.cache_dir; None without one."""
    if profile.npu.cache_dir is None:
        return None
    facts = {**_versions(), "sources": _digest_of_sources(), "model": repr(config), "mesh": repr(resolve_mesh(profile))}
    facts |= {"dtype": profile.dtype, "quantization": profile.quantization}
    facts |= {"mode": profile.graph.mode, "weight_prefetch_mb": profile.npu.weight_prefetch_mb}
    facts |= {"attention": ops.attention, "writes_kv_by_atb": ops.writes_kv_by_atb}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(profile.npu.cache_dir).expanduser() / digest
    logger.info("compiled graphs are kept in %s", folder)
    return folder


def _versions() -> dict[str, Any]:
    return {"torch": torch.__version__, "torch_npu": load_torch_npu().__version__, "cann": cann_version()}


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for package in _TRACED:
        root = Path(str(import_module(package).__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
