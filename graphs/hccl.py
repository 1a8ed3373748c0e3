"""Which all-reduces HCCL gives to a device's vector cores (AIV), by their size: larger ones go through its AI_CPU,
which takes several times as long for one.

Source: `SelectAlgfor91093` in src/algorithm/impl/operator/all_reduce_operator.cc of hicann/hcomm (48493ec), for one
Atlas A3 node and eager or captured calls; the largest size of a rank is `AIV_ALL_REDUCE_A3_ENTRY_SIZE` of hccl_aiv.h.
Which copy of that source a CANN release has is unknown: HCCL's own log names the algorithm ("algName").
"""

from __future__ import annotations

from collections.abc import Mapping

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
