"""Fixtures of the simulated NPU. Tests that use them are marked `sim`; elsewhere they are skipped with the reason."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from sim import export, runtime


@pytest.fixture(scope="session")
def torch_npu() -> Any:
    """The real torch_npu, loaded on stub libraries."""
    reason = runtime.why_not()
    if reason is not None:
        pytest.skip(f"no simulated NPU: {reason}")
    module = runtime.load()
    export.load_torchair()
    return module


@pytest.fixture
def npu(torch_npu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A simulated device, current in this thread."""
    import torch
    from sim.device import SimulatedNpu

    # Which of two forms is faster here says nothing: none is.
    monkeypatch.setattr("lopa_ascend.selftest.fuse.median_seconds", lambda *_: 1.0)
    gc.collect()  # graphs of earlier tests: a capture does not outlive another graph's end
    torch.npu.set_device(0)
    with SimulatedNpu(record=True) as device:
        yield device
