"""Padded sizes: few, and never far above what a step needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs.buckets import Buckets, cached_bucket, covering_sizes, fit, pad_rows

KNEE = 184.0


def buckets(**changes: object) -> Buckets:
    settings: dict[str, object] = {"knee": KNEE, "max_width": 512, "max_tokens": 4096, **changes}
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


@pytest.mark.parametrize("num_rows", [1, 3, 4, 8, 14, 20])
def test_padding_a_step_costs_less_than_a_tenth_wherever_eight_entries_do_not(num_rows: int) -> None:
    for width in range(1, 205):
        shape = buckets(max_tokens=8192).shape(num_rows, width)
        assert shape is not None
        rows, padded = shape
        assert cost(rows * padded) <= 1.1 * cost(rows * width) or padded - width < 8


def test_whole_blocks_are_not_padded() -> None:
    blocks = tuple(range(32, 513, 32))
    for num_rows in (1, 4, 8):
        assert [buckets(wanted_widths=blocks).shape(num_rows, width) for width in blocks] == [
            (num_rows, width) for width in blocks
        ]


def test_weight_bound_steps_share_few_shapes() -> None:
    assert len({buckets().shape(1, width) for width in range(1, 129)}) <= 8


def test_what_is_too_large_to_capture_has_no_bucket() -> None:
    assert buckets().shape(1, 1056) is None
    assert buckets().shape(16, 300) is None
    assert buckets(rows=(1, 4)).shape(5, 32) is None


def test_sizes_in_the_profile_replace_the_chosen_ones() -> None:
    fixed = buckets(widths=(64, 128), rows=(1, 4))
    assert fixed.shape(2, 40) == (4, 64)
    assert fixed.shape(1, 129) is None


def test_rows_are_exact_up_to_sixteen_and_then_padded_by_an_eighth_at_most() -> None:
    assert [pad_rows(rows) for rows in range(1, 17)] == list(range(1, 17))
    assert all(rows <= pad_rows(rows) < rows * 1.125 for rows in range(17, 300))


@given(st.integers(1, 20000))
def test_reads_always_fit(count: int) -> None:
    assert buckets().reads(count) >= count


def test_cached_keys_are_rounded_to_powers_of_two_within_the_cache() -> None:
    assert [cached_bucket(n, 1500) for n in (0, 1, 64, 65, 1024, 1025)] == [0, 64, 64, 128, 1024, 1500]
