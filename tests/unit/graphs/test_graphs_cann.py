"""What a reader is told of an error of torch-npu: the texts are those of public reports, cut short."""

from __future__ import annotations

import pytest

from common.errors import is_out_of_memory
from common.runtime.waiting import explained
from graphs.cann import said_by_cann, told

ROOT_INFO = "createHCCLComm:compiler_depend.ts:1479 HCCL function error: HcclGetRootInfo(&hcclID), error code is 11"
OF_HCCL = "[ERROR] 2025-03-26-17:01:03 (PID:159, Device:0, RankID:-1) ERR02200 DIST call hccl api failed."
QUERY = "query:compiler_depend.ts:59 NPU function error: acl::AclQueryEventRecordedStatus(..), error code is 507014"
BOUND = "Failed to bind the IP port. Reason: The IP address and port have been bound already."
LISTENS = "Failed to enable listening for the host network adapter socket."
TIMES_OUT = "The aicore execution times out."
TILING = "numHeads / numKvHeads = 8, MLA only support {32, 64, 128}."
REPORTS = {
    # vllm-project/vllm-ascend #405
    f"{ROOT_INFO}\n{OF_HCCL}\nEJ0003: [PID: 159] 2025-03-26-17:01:02.816.428 {BOUND}\n   TraceBack": f"EJ0003: {BOUND}",
    # docs/zh/user_guide/fault_diagnosis/cluster_info_nego.md of mirror-cann/hccl
    f"{ROOT_INFO}\n[PID: 2267203] 2025-11-21-11:38:29.575.404 Bind_IP_Port(EI0019): {LISTENS}": f"EI0019: {LISTENS}",
    # vllm-project/vllm-ascend #4972
    f"{QUERY}\n[Error]: {TIMES_OUT} \n   Rectify the fault.\nEH9999: Inner Error!\n   rtEventQueryStatus": TIMES_OUT,
    # docs/source/faqs.md of vllm-project/vllm-ascend
    f"EZ9999: Inner Error!\nEZ9999: [PID: 62938] 2025-05-27-06:52:12.455.807 {TILING}": f"EZ9999: {TILING}",
}


@pytest.mark.parametrize(("report", "said"), REPORTS.items(), ids=["EJ0003", "EI0019", "507014", "EZ9999"])
def test_what_cann_says_comes_before_the_name_of_a_function(report: str, said: str) -> None:
    error = RuntimeError(report)
    assert said_by_cann(error) == said
    assert told(error) == f"{said} ({report.splitlines()[0]})"
    assert str(explained(error, rank=3, step=5)) == f"rank 3, step 5: {told(error)}"


@pytest.mark.parametrize(
    "report", ["CUDA error: invalid argument\nCompile with", "mat1 and mat2 shapes", "[Error]:", ""]
)
def test_other_errors_are_told_by_their_first_line(report: str) -> None:
    assert said_by_cann(RuntimeError(report)) is None
    assert told(RuntimeError(report)) == (report.splitlines() or ["RuntimeError('')"])[0]


@pytest.mark.parametrize(
    "report",
    [
        "call aclnnX failed, error code is 207001\nEL0004: [PID: 3] 2025-09-28-07:22:29 Failed to allocate memory.",
        f"{ROOT_INFO}\n[PID: 3] 2025-11-03-20:18:46.447.213 Resource_Error_Insufficient_Device_Memory(EI0011): Failed",
    ],
    ids=["EL0004", "EI0011"],
)  # fmt: skip
def test_memory_that_cann_or_hccl_lacks_is_out_of_memory(report: str) -> None:
    assert is_out_of_memory(RuntimeError(report))
    assert "lower max_num_requests" in str(explained(RuntimeError(report), rank=0, step=1))
