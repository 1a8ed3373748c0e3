"""What an engine leaves behind that has failed: memory that a device may still use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.runtime import engine as engines
from lopa_cuda.engine import CudaEngine


@pytest.mark.parametrize(
    ("world_size", "device", "is_kept"), [(2, "cuda", True), (1, "cuda", False), (2, "cpu", False)]
)
def test_a_rank_that_may_wait_on_its_device_for_ever_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch, world_size: int, device: str, is_kept: bool
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(engines, "keep_until_end", kept.append)
    engine: Any = object.__new__(CudaEngine)
    engine.mesh = SimpleNamespace(rank=0, world_size=world_size)
    engine.device, engine.num_steps = torch.device(device), 3
    assert str(engine._failed(RuntimeError("no answer"))) == "rank 0, step 3: no answer"
    engine.close()  # does not touch what the device may still use
    assert kept == ([engine] if is_kept else [])
