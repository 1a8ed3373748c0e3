"""Lengths alone say what a block sees: virtual rows over paged KV equal dense attention under a block-causal mask."""

from __future__ import annotations

import numpy as np
import plain
import pytest
import torch
from branches import CASES, Branch, Contents, dense, paged

from lopa_ascend.ops import AttentionForm, group_queries, reference_ops

# The kernel rounds its result to bfloat16 once.
ROUNDING = {"relative": plain.BF16_STEP * 1.01, "absolute": 1e-5}


@pytest.mark.parametrize(
    ("num_kv_heads", "form"),
    [(heads, AttentionForm(version, dims)) for heads, dims in ((1, 3), (1, 4), (7, 3)) for version in (1, 2)],
)
@pytest.mark.parametrize("case", CASES)
def test_virtual_rows_equal_the_masked_dense_form(case: str, num_kv_heads: int, form: AttentionForm) -> None:
    contents = Contents(num_kv_heads)
    ops = reference_ops(attention=form)
    for branch, got in zip(CASES[case], paged(ops, CASES[case], contents), strict=True):
        plain.assert_close(got, dense(branch, contents), **ROUNDING)


def test_rounded_weights_cost_little() -> None:
    """Against the textbook formula, for values of unit variance: what docs/ascend.md tolerates on a device."""
    contents, [branch] = Contents(1), CASES["one active block"]
    exact = dense(branch, contents, weights=torch.float64)
    plain.assert_close(paged(reference_ops(), [branch], contents)[0], exact, absolute=4e-3)


def test_batching_branches_changes_no_bit() -> None:
    contents, branches = Contents(1), CASES["branches with windows of different length"]
    together = paged(reference_ops(), branches, contents)
    alone = [paged(reference_ops(), [branch], contents)[0] for branch in branches]
    assert all(torch.equal(left, right) for left, right in zip(together, alone, strict=True))


def test_a_block_is_the_same_in_branches_that_differ_behind_it() -> None:
    """What single-phase Pre-Write rests on: every branch writes the same KV for a finished block."""
    contents = Contents(1)
    short, long = paged(reference_ops(), [Branch(132, [32]), Branch(132, [32, 32])], contents)
    assert torch.equal(short[:32], long[:32])


def test_queries_of_one_horizon_become_one_virtual_row() -> None:
    groups = group_queries(np.array([0, 0, 0, 0, 0, 1]), np.array([8, 8, 12, 12, 12, 12]))
    assert groups.order_T.tolist() == [0, 1, 2, 3, 4, 5]
    assert groups.query_ends == [2, 5, 6]
    assert groups.kv_lengths == [8, 12, 12]
    assert groups.row_V.tolist() == [0, 0, 1]


def test_shift_entries_behind_the_window_join_their_block() -> None:
    groups = group_queries(np.zeros(6, dtype=np.int64), np.array([8, 8, 12, 12, 8, 12]))
    assert groups.order_T.tolist() == [0, 1, 4, 2, 3, 5]
    assert groups.query_ends == [3, 6]
