"""Sizes at which steps are captured, beside those at which a sum leaves the vector cores."""

from __future__ import annotations

import pytest

from lopa_ascend.shapes import MAX_CAPTURED_TOKENS, Shapes

USUAL = Shapes.of((), (), 48).tokens


@pytest.mark.parametrize(("most", "size"), [(73, 72), (585, 584), (292, 288), (1170, None), (0, None), (7, None)])
def test_the_size_below_the_edge_is_captured(most: int, size: int | None) -> None:
    shapes = Shapes.of((), (), 48, most)
    assert set(shapes.tokens) == {*USUAL, *([] if size is None else [size])}
    assert list(shapes.tokens) == sorted(shapes.tokens)
    assert shapes.heads == Shapes.of((), (), 48).heads
    assert shapes.most_tokens == MAX_CAPTURED_TOKENS


def test_two_rows_of_a_block_stay_on_vector_cores_in_one_order() -> None:
    """2 x 32 positions of Dream-7B in two virtual rows, with HCCL_DETERMINISTIC true."""
    assert Shapes.of((), (), 48).shape(64, 2) == (80, 4)
    assert Shapes.of((), (), 48, 73).shape(64, 2) == (72, 4)


def test_the_user_s_sizes_are_taken_as_they_are() -> None:
    assert Shapes.of((64, 128), (), 48, 73).tokens == (64, 128)
