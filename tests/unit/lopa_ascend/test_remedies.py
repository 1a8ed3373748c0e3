"""What a start says to do about a check that has failed: a port that is taken is no fault of CANN's release."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from common.config import DeviceProfile
from common.errors import MissingCapability
from common.processes import Mesh
from lopa_ascend.ops import reference_ops
from lopa_ascend.selftest import Sizes, require_correct
from lopa_ascend.selftest.grades import Grade, failed

PROFILE = DeviceProfile.model_validate({"name": "p", "engine": "lopa_ascend", "device": "npu"})
BOUND = """createHCCLComm:build/torch_npu.dir/compiler_depend.ts:1479 HCCL function error: HcclGetRootInfo(&hcclID)
[ERROR] 2025-03-26-17:01:03 (PID:159, Device:0, RankID:-1) ERR02200 DIST call hccl api failed.
EJ0003: [PID: 159] 2025-03-26-17:01:02.816.428 Failed to bind the IP port."""
CASES = {
    BOUND: "give each its own ports with HCCL_IF_BASE_PORT",
    BOUND.replace("EJ0003", "EI0019"): "give each its own ports with HCCL_IF_BASE_PORT",
    BOUND.replace("EJ0003", "EJ0001"): "wait for 10 s",
    BOUND.replace("EJ0003", "EI0015"): "HCCL_SOCKET_IFNAME",
    BOUND.replace("EJ0003", "EI0006"): "hccn_tool -i N -tls -g",
    BOUND.replace("EJ0003", "EL0004"): "npu-smi info",
    "Unknown keyword argument": "install the CANN release that this torch-npu was made for",
}


@pytest.mark.parametrize(
    ("error", "wanted"), CASES.items(), ids=["EJ0003", "EI0019", "EJ0001", "EI0015", "EI0006", "EL0004", "other"]
)
def test_a_failed_check_names_its_own_remedy(monkeypatch: pytest.MonkeyPatch, error: str, wanted: str) -> None:
    module = import_module("lopa_ascend.selftest.examine")
    monkeypatch.setattr(module, "versions", lambda: "CANN 9.1.0 and torch-npu 2.10.0.post4")

    def fails(*_: Any) -> None:
        raise RuntimeError(error)

    ops = reference_ops()
    monkeypatch.setattr(ops, "rms_norm", fails)
    sizes = Sizes(width=256, num_heads=2, num_kv_heads=1, inner=256)
    with pytest.raises(MissingCapability) as found:
        require_correct(ops, sizes, torch.device("cpu"), Mesh(), PROFILE, ("FLOAT",))
    assert str(found.value).startswith("rank 0: rms_norm is wrong here (") and wanted in str(found.value)
    assert ("install the CANN release" in str(found.value)) is ("Unknown" in error)


def test_the_sentence_of_cann_is_not_cut_off() -> None:
    assert failed(RuntimeError(BOUND)).grade is Grade.WRONG
    assert failed(RuntimeError(BOUND)).detail.startswith("EJ0003: Failed to bind the IP port. (createHCCLComm:")
