"""What a start says where a device's memory does not suffice: beside the weights, and for captures after the KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError, EngineError
from common.processes import Mesh
from lopa_ascend import assemble

PROFILE = DeviceProfile.model_validate({"name": "p", "engine": "lopa_ascend", "device": "npu"})
RUN = RunConfig.model_validate({"model": "m", "decode": {"window_attention": "block_causal"}})
ENGINE: Any = SimpleNamespace(mesh=Mesh(rank=3))
GRAPHS: Any = SimpleNamespace(shapes=None)


def warm(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(assemble, "warm_up", fails)
    assemble._warm(ENGINE, GRAPHS, None, RUN, PROFILE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        "NPU out of memory. Tried to allocate 180.00 MiB (NPU 1; 60.96 GiB total capacity; 86.81 MiB free)",
        "capture_begin: NPU function error, error code is 207001\nEL0004: [PID: 1] 2025 Failed to allocate memory.",
    ],
)
def test_captures_that_find_no_memory_name_what_took_it(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    with pytest.raises(
        EngineError, match=r"rank 3: .* lower gpu_memory_utilization, which is 0\.9, or npu\.max_graphs"
    ):
        warm(monkeypatch, error)


def test_other_errors_of_a_capture_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"^aclnnX failed$"):
        warm(monkeypatch, "aclnnX failed")


def test_memory_that_another_process_holds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = SimpleNamespace(mem_get_info=lambda device: (2**30, 61 * 2**30))
    monkeypatch.setattr(torch, "npu", held, raising=False)
    with pytest.raises(
        ConfigError, match=r"1\.0 GiB of meta are free .*: end what else uses the device \(`npu-smi info`\)"
    ):
        assemble._num_pages(PROFILE, RUN, Mesh(), 512, 2**20, torch.device("meta"))
