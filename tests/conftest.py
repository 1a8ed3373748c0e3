"""Shared by all tests: the golden models, a small profile, and reasons for skipping device tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import DeviceProfile

# The models here are too small to share, and threads that wait for each other are slow on a busy machine.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, none is visible")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def cpu() -> DeviceProfile:
    return DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=512)
