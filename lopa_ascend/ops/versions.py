"""Versions of what the engine runs on, for error messages and cache keys."""

from __future__ import annotations

from lopa_ascend.ops import load_torch_npu


def cann_version() -> str:
    try:
        return str(load_torch_npu().npu.utils.get_cann_version())
    except (AttributeError, RuntimeError):
        return "of unknown release"
