"""The sizes up to which HCCL sums on vector cores, at Dream-7B's width in bfloat16."""

from __future__ import annotations

import pytest

from graphs.hccl import most_aiv_bytes, most_aiv_tokens

AIV = {"HCCL_OP_EXPANSION_MODE": "AIV"}
IN_ONE_ORDER = {**AIV, "HCCL_DETERMINISTIC": "true"}


@pytest.mark.parametrize(
    "num_ranks, environment, tokens",
    [
        (4, {**AIV, "HCCL_DETERMINISTIC": "false"}, 585),
        (4, AIV, 585),
        (2, AIV, 292),
        (4, IN_ONE_ORDER, 73),
        (2, IN_ONE_ORDER, 73),
        (4, {**AIV, "HCCL_DETERMINISTIC": "strict"}, 73),
        (16, IN_ONE_ORDER, 1170),
        (4, {}, 0),
        (4, {"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, 0),
    ],
)
def test_the_largest_step_on_vector_cores(num_ranks: int, environment: dict[str, str], tokens: int) -> None:
    assert most_aiv_tokens(num_ranks, 3584, 2, environment) == tokens


def test_more_than_eight_ranks_stay_below_eight_mib_in_one_order() -> None:
    assert most_aiv_bytes(8, IN_ONE_ORDER) == 512 * 2**10
    assert most_aiv_bytes(9, IN_ONE_ORDER) == 8 * 2**20 - 1
