"""Padded sizes: few, never far above what a step needs, and where HCCL sums on vector cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs.buckets import Buckets, covering_sizes, fit, round_up
from graphs.hccl import most_aiv_bytes, most_aiv_tokens

KNEE = 184.0


def buckets(**changes: object) -> Buckets:
    settings: dict[str, object] = {"knee": KNEE, "max_tokens": 4096, "max_reads": 512, **changes}
    return Buckets(**settings)  # type: ignore[arg-type]


def cost(tokens: int) -> float:
    return 1 + tokens / KNEE


@given(st.integers(1, 2000), st.integers(1, 32), st.floats(0.02, 0.5))
def test_rounding_up_costs_at_most_the_tolerance_beyond_one_multiple(
    limit: int, multiple: int, tolerance: float
) -> None:
    sizes = covering_sizes(limit, cost, multiple=multiple, tolerance=tolerance)
    assert sizes[-1] >= limit
    for size in range(1, limit + 1):
        padded = fit(size, sizes)
        assert padded is not None
        assert padded - size < multiple or cost(padded) <= (1 + tolerance) * cost(size)


def test_padding_a_step_costs_less_than_a_tenth_wherever_eight_tokens_do_not() -> None:
    sizes = buckets().tokens
    for tokens in range(1, 4097):
        padded = fit(tokens, sizes)
        assert padded is not None
        assert cost(padded) <= 1.1 * cost(tokens) or padded - tokens < 8


@given(st.integers(600, 9000))
def test_prompts_are_padded_by_half_as_much(max_tokens: int) -> None:
    sizes = buckets(max_tokens=max_tokens).tokens
    assert sizes[-1] == round_up(max_tokens, 8) and len(set(sizes)) == len(sizes)
    for tokens in range(513, min(max_tokens, 2048) // 16 * 16 + 1):
        padded = fit(tokens, sizes)
        assert padded is not None
        assert cost(padded) <= 1.05 * cost(tokens) or padded - tokens < 16


@given(st.integers(1, 2000))
def test_sizes_of_prompts_end_at_their_limit_and_are_multiples_of_16(sixteens: int) -> None:
    sizes = buckets().of_prompts(16 * sixteens)
    assert sizes[-1] == 16 * sixteens and list(sizes) == sorted(set(sizes))
    assert all(size % 16 == 0 for size in sizes) and len(sizes) <= 80


def test_wanted_sizes_are_not_padded() -> None:
    blocks = [32 * rows * number for rows in (1, 3, 8) for number in range(1, 9)]
    wanting = buckets().wanting(blocks)
    assert set(blocks) <= set(wanting.tokens)
    assert set(wanting.tokens) >= set(buckets().tokens) and len(wanting.tokens) <= len(buckets().tokens) + len(blocks)
    assert buckets().wanting([5000]) == buckets()


def test_wanted_sizes_of_many_tokens_are_multiples_of_16_where_these_are_captured() -> None:
    assert buckets().wanting([97, 776]).wanted == (104, 784)
    assert buckets(max_tokens=776).wanting([776]).wanted == (776,)


def test_all_sizes_are_few() -> None:
    assert len(buckets().tokens) <= 60
    assert len(buckets().reads) <= 20 and buckets().reads[-1] == 512


def test_what_is_too_large_to_capture_has_no_size() -> None:
    assert fit(4097, buckets().tokens) is None


def test_sizes_in_the_profile_replace_the_chosen_ones() -> None:
    assert buckets(fixed=(64, 128)).wanting([32]).tokens == (64, 128)


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
