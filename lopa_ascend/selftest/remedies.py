"""What an operator does about a check that has failed, by the code that CANN names in it.

Codes of HCCL: docs/zh/user_guide/fault_diagnosis of mirror-cann/hccl. Most of a cluster's first faults are among them,
and none is a fault of CANN's release.
"""

from __future__ import annotations

_OTHER_CANN = (
    "install the CANN release that this torch-npu was made for, or set selftest to warn and trust no answer; see "
    "docs/ascend.md"
)
_PORTS = (
    "end other runs on this node, or give each its own ports with HCCL_IF_BASE_PORT, and where they share devices "
    "HCCL_NPU_SOCKET_PORT_RANGE=auto; `lopa doctor --profile` says which ports to reserve"
)
_MEMORY = "end what else holds memory of the devices (`npu-smi info`)"
_REMEDIES = {
    "EI0001": "correct or unset the variable that it names",
    "EI0006": "look at the other ranks first; else the devices do not reach each other: `hccn_tool -i N -link -g`, "
    "and `hccn_tool -i N -tls -g`, whose switch is the same on all",
    "EI0011": _MEMORY,
    "EI0015": "look at the ranks that it names; else the hosts do not reach each other: name the interface between "
    "them in HCCL_SOCKET_IFNAME",
    "EI0019": _PORTS,
    "EI0020": _PORTS,
    "EJ0001": "end what still uses the devices (`npu-smi info`), wait for 10 s, and start again",
    "EJ0003": _PORTS,
    "EL0004": _MEMORY,
}


def remedy(detail: str) -> str:
    """Return what to do, as part of a sentence. detail: that of a finding."""
    return next((told for code, told in _REMEDIES.items() if code in detail), _OTHER_CANN)
