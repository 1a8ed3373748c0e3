"""Shared by all tests: the golden models, a small profile, and reasons for skipping device tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from common.config import DeviceProfile

# The models here are too small to share, and threads that wait for each other are slow on a busy machine.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skips = {}
    if not torch.cuda.is_available():
        skips["cuda"] = pytest.mark.skip(reason="needs a CUDA device, none is visible")
    if not os.environ.get("LOPA_SLOW"):
        skips["slow"] = pytest.mark.skip(reason="others show it in part, or it takes minutes: set LOPA_SLOW=1")
    for item in items:
        for name in skips.keys() & item.keywords.keys():
            item.add_marker(skips[name])


@pytest.fixture
def cpu() -> DeviceProfile:
    return DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=512)
