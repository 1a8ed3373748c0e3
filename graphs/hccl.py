"""Which all-reduces HCCL gives to a device's vector cores (AIV), by their size: larger ones go through its AI_CPU,
which takes several times as long for one. And which ports it listens on.

Source of the sizes: `SelectAlgfor91093` in src/algorithm/impl/operator/all_reduce_operator.cc of hicann/hcomm
(48493ec), for one Atlas A3 node and eager or captured calls; the largest size of a rank is
`AIV_ALL_REDUCE_A3_ENTRY_SIZE` of hccl_aiv.h.
Which copy of that source a CANN release has is unknown: HCCL's own log names the algorithm ("algName").
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DETERMINISTIC, EXPANSION = "HCCL_DETERMINISTIC", "HCCL_OP_EXPANSION_MODE"

_KIB, _MIB = 2**10, 2**20
_FEW_RANKS = 8


def sums_in_one_order(environment: Mapping[str, str]) -> bool:
    """Whether these variables have HCCL sum in the same order in every run (`true`, or `strict`)."""
    return environment.get(DETERMINISTIC, "false").lower() != "false"


def most_aiv_bytes(num_ranks: int, environment: Mapping[str, str]) -> int:
    """Return the bytes of the largest all-reduce over so many ranks of a node that runs on vector cores; 0 where these
    variables do not ask for them."""
    if environment.get(EXPANSION) != "AIV":
        return 0
    if not sums_in_one_order(environment):
        return num_ranks * _MIB
    return 512 * _KIB if num_ranks <= _FEW_RANKS else 8 * _MIB - 1


def most_aiv_tokens(num_ranks: int, width: int, element_bytes: int, environment: Mapping[str, str]) -> int:
    """Return the most tokens of a step whose all-reduces, [tokens, width], all run on vector cores."""
    return most_aiv_bytes(num_ranks, environment) // (width * element_bytes)


# docs/zh/user_guide/hccl_env/HCCL_IF_BASE_PORT.md and HCCL_HOST_SOCKET_PORT_RANGE.md of mirror-cann/hccl.
_BASE_PORT, _PORT_RANGE = "HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE"
_FIRST_PORT, _NUM_PORTS = 60000, 32


def told_of_ports(environment: Mapping[str, str], settings: Path) -> str | None:
    """Say how to reserve the ports that HCCL listens on, where the system gives them to other connections as well;
    None: it does not, or the user has chosen ports. settings: the kernel's folder /proc/sys/net/ipv4."""
    base = environment.get(_BASE_PORT, "")
    first = int(base) if base.isdecimal() else _FIRST_PORT
    try:
        lowest, highest = map(int, (settings / "ip_local_port_range").read_text(encoding="ascii").split())
        reserved = (settings / "ip_local_reserved_ports").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    ports = range(first, first + _NUM_PORTS)
    is_free = all(port < lowest or port > highest or _is_reserved(port, reserved) for port in ports)
    if _PORT_RANGE in environment or is_free:
        return None
    kept = f"{reserved},{ports[0]}-{ports[-1]}".lstrip(",")
    return (
        f"HCCL listens on {ports[0]} to {ports[-1]}, which the system may have given to another connection (EI0019): "
        f"set {_BASE_PORT} to {lowest - _NUM_PORTS} or less, or as root "
        f"sysctl -w net.ipv4.ip_local_reserved_ports={kept}"
    )


def _is_reserved(port: int, reserved: str) -> bool:
    spans = (span.split("-") for span in reserved.split(",") if span)
    return any(int(span[0]) <= port <= int(span[-1]) for span in spans)
