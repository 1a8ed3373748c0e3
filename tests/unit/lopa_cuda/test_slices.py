"""A pass cut over ranks: when it is, that every entry is somebody's, and that pieces see the keys of whole rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from common.decoding import Int, PredictionOrder, RowField, Sampling, StepPlan, assign_rows
from common.processes import Mesh
from graphs.buckets import Buckets
from lopa_cuda.shapes import Shapes
from lopa_cuda.steps import (
    RECORD,
    Run,
    StagedSlice,
    StepBuffers,
    Tiling,
    cut,
    deal,
    runs_of,
    slice_sizes,
    slices_pay,
    write_tiles,
)
from lopa_cuda.steps.slices import LEAST_SAVED

TILING = Tiling(7, 64)
BUCKETS = Buckets(knee=184.0, max_tokens=4096, max_reads=512)


def plan_of(num_entries: list[int], requests: list[int] | None = None, *, commits_locally: bool = False) -> StepPlan:
    """Rows one after another, each of its own request unless told; every third entry is read."""
    num_tokens = sum(num_entries)
    row_fields_8R = np.zeros((len(RowField), len(num_entries)), dtype=np.int64)
    row_fields_8R[RowField.FIRST] = np.cumsum(num_entries) - num_entries
    row_fields_8R[RowField.NUM_ENTRIES] = num_entries
    row_fields_8R[RowField.NUM_KEYS] = np.array(num_entries) - 1  # after which one entry shifts
    row_fields_8R[RowField.START] = row_fields_8R[RowField.CACHED] = 64 * np.arange(len(num_entries))
    row_fields_8R[RowField.SLOT] = np.arange(len(num_entries))
    return StepPlan(
        np.arange(3 * num_tokens).reshape(3, -1), np.arange(num_tokens) % 3 == 0, row_fields_8R,
        np.arange(len(num_entries)) if requests is None else np.array(requests), (), Sampling("default", 0),
        commits_locally,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_entries", "requests", "num_ranks", "expected"),
    [
        ([1040], None, 4, True),
        ([1040], None, 1, False),
        ([2 * LEAST_SAVED], None, 2, True),
        ([2 * LEAST_SAVED - 1], None, 2, False),
        ([600, 500, 30], None, 2, True),
        ([600, 600], None, 2, False),  # a prompt on each rank is as good
        ([600, 600], None, 4, True),
        ([1040, 64, 64], [0, 1, 1], 2, False),  # beside branches
        ([64] * 8, [0] * 8, 4, False),
    ],
)
def test_a_pass_is_cut_where_that_spares_the_busiest_rank(
    num_entries: list[int], requests: list[int] | None, num_ranks: int, expected: bool
) -> None:
    plan = plan_of(num_entries, requests)
    assert slices_pay(plan, assign_rows(plan, num_ranks)) is expected


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_entry_is_in_one_slice_with_the_keys_of_its_row(seed: int, num_ranks: int) -> None:
    rng = np.random.default_rng(seed)
    plan = plan_of(rng.integers(2, 200, int(rng.integers(1, 6))).tolist())
    length = -(-plan.num_tokens // num_ranks) + int(rng.choice([0, 1, 40]))
    row_T = np.arange(plan.num_rows).repeat(plan.num_entries_R)
    shares = cut(plan, num_ranks, length)
    seen = np.zeros(plan.num_tokens, dtype=int)
    for rank, share in enumerate(shares):
        tokens = np.arange(share.num_tokens)
        entries = share.in_plan(tokens)
        assert 0 < share.num_tokens <= length and share.first_key_R is not None
        if rank * length < plan.num_tokens:
            seen[entries] += 1
            assert (entries == rank * length + tokens).all()
        spans = share.spans_6R
        rows = row_T[entries[spans[RowField.FIRST]]]
        assert (row_T[entries] == rows.repeat(spans[RowField.NUM_ENTRIES])).all()
        assert (share.first_key_R == plan.first_R[rows]).all()
        whole = slice(RowField.NUM_KEYS, RowField.SLOT + 1)
        assert (spans[whole] == plan.row_fields_8R[whole][:, rows]).all()
    assert (seen == 1).all()


def test_a_rank_for_which_nothing_is_left_repeats_an_entry_that_nobody_reads_twice() -> None:
    plan = plan_of([20])
    shares = cut(plan, 4, 9)
    assert [share.num_tokens for share in shares] == [9, 9, 2, 1]
    entries_of = [share.in_plan(share.of_entries(plan.is_read_T).nonzero()[0]) for share in shares]
    order = PredictionOrder(plan.num_tokens, entries_of, 4)
    predicted = np.full((4, 4, 3), -1, dtype=np.float32)
    for rank, entries_M in enumerate(entries_of):
        predicted[rank, : len(entries_M)] = (entries_M + 100 * (rank == 3))[:, None]
    values_3T = order.predictions(predicted).values_3T
    assert (values_3T[:, plan.is_read_T] == np.arange(20)[plan.is_read_T]).all()


@pytest.mark.parametrize("length", [64, 70])
def test_tiles_and_runs_of_a_slice_name_its_rows_first_keys(length: int) -> None:
    plan = plan_of([50, 100, 30])
    for rank, share in enumerate(cut(plan, 3, length)):
        needed = TILING.needed(share.spans_6R[1], length)
        table = np.full((needed + 2, RECORD), 9, dtype=np.int32)
        write_tiles(table, TILING, share.spans_6R, length, share.first_key_R)
        rows = [row for row in range(3) if share.num_tokens and _overlaps(plan, row, rank, length)]
        num_padding = length - share.num_tokens
        padding = [(share.num_tokens, num_padding, 1, 0, 0, 0, 0)] if num_padding else []
        pieces = [(*piece, plan.first_R[row]) for piece, row in zip(share.spans_6R.T.tolist(), rows, strict=True)]
        found = [(*record[:6], record[7]) for record in table[:needed].tolist()]
        assert list(dict.fromkeys(found)) == [*pieces, *padding] and not table[needed:].any()
        assert runs_of(share, length) == tuple(Run(1, *piece[1:]) for piece in [*pieces, *padding])


def _overlaps(plan: StepPlan, row: int, rank: int, length: int) -> bool:
    first, end = rank * length, (rank + 1) * length
    return bool(plan.first_R[row] < end and plan.first_R[row] + plan.num_entries_R[row] > first)


def test_captured_slices_fit_the_staging_memory_and_begin_where_cutting_pays() -> None:
    sizes = Buckets(knee=184.0, max_tokens=4096, max_reads=512, fixed=(8, 48, 128, 256, 1024, 2000, 4096))
    assert slice_sizes(sizes.of_prompts, 4, 4096) == [48, 128, 256, 1024]
    assert slice_sizes(sizes.of_prompts, 3, 4100) == [48, 128, 256, 1024, 1360]
    assert slice_sizes(sizes.of_prompts, 1, 4096) == []


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_slice_is_padded_by_a_twentieth_at_most(num_ranks: int) -> None:
    sizes = slice_sizes(BUCKETS.of_prompts, num_ranks, 4096)
    assert sizes[-1] == 4096 // num_ranks and all(size % 16 == 0 for size in sizes)
    for before, size in pairwise(sizes):
        assert size <= before + (32 if size <= 512 else 16) or 184 + size <= 1.05 * (184 + before + 1)


def shapes_of(rank: int, *, captures: bool = True) -> Shapes:
    return Shapes(Mesh(bp_rank=rank, bp_size=4), BUCKETS, TILING, 4096, captures=captures)


@pytest.mark.parametrize("prompts", [[1040], [300, 7, 40, 500], [2000, 96], [4096]])
def test_all_ranks_take_the_same_captured_slice(prompts: list[int]) -> None:
    plan = plan_of(prompts, commits_locally=True)
    row_of = assign_rows(plan, 4)
    arranged = [shapes_of(rank).arranged(plan, row_of) for rank in range(4)]
    shares, key = arranged[0]
    assert all(other == key for _, other in arranged)
    assert key.is_captured and key.num_slices == 4 and key.num_tokens in shapes_of(0).slices
    assert key.num_tokens <= 1.15 * plan.num_tokens / 4 + 8 and key.num_staged >= plan.num_tokens
    assert sum(share.num_tokens for share in shares) == plan.num_tokens


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_dealt_shares_hold_their_rows_one_behind_another(num_ranks: int) -> None:
    plan = plan_of([64, 5, 64, 33, 64, 64, 1], [0, 0, 0, 1, 1, 2, 2])
    row_of: Int = assign_rows(plan, num_ranks)
    for rows, share in zip(row_of, deal(plan, row_of), strict=True):
        spans = [plan.row_fields_8R[: RowField.SLOT + 1, row].tolist() for row in rows]
        firsts = [0, *np.cumsum([span[RowField.NUM_ENTRIES] for span in spans]).tolist()]
        assert share.spans_6R.T.tolist() == [[first, *span[1:]] for first, span in zip(firsts, spans, strict=False)]
        assert share.entry_T is not None and share.num_tokens == firsts[-1]
        entries = [np.arange(span[0], span[0] + span[RowField.NUM_ENTRIES]) for span in spans]
        assert np.array_equal(share.entry_T, np.concatenate(entries))


def test_what_is_longer_than_captured_slices_runs_as_it_is() -> None:
    plan = plan_of([4100])
    shares, key = shapes_of(1).arranged(plan, assign_rows(plan, 4))
    assert (key.is_captured, key.num_tokens, key.num_slices) == (False, 1040, 4) and len(shares) == 4
    _, key = shapes_of(1, captures=False).arranged(plan, assign_rows(plan, 4))
    assert key.num_tokens == 1025


def test_rows_that_are_dealt_out_stay_as_they_are() -> None:
    plan = plan_of([64] * 8, [0] * 8)
    row_of: Int = assign_rows(plan, 4)
    shares, key = shapes_of(2).arranged(plan, row_of)
    assert key.num_slices == 1 and key.num_tokens >= 128
    assert all((share.spans_6R == one.spans_6R).all() for share, one in zip(shares, deal(plan, row_of), strict=True))


def test_used_buffers_hold_what_fresh_ones_would() -> None:
    """Whatever the step before has left in them: other rows, the same rows, or pieces of rows."""
    key = shapes_of(0).captured_key(512)

    def fresh() -> StepBuffers:
        return StepBuffers(key, torch.device("cpu"), TILING, StagedSlice(512, None))

    used, longer, shorter = fresh(), plan_of([64] * 7), plan_of([30, 50])
    moved = longer._replace(row_fields_8R=longer.row_fields_8R.copy())
    moved.row_fields_8R[RowField.START] += 32
    wholes = [(plan, False) for plan in (longer, moved, moved, shorter, longer)]
    for plan, is_cut in [*wholes, (longer, True), (longer, False)]:
        share = cut(plan, 1, 512)[0] if is_cut else deal(plan, assign_rows(plan, 1))[0]
        expected = fresh()
        for buffers in (used, expected):
            buffers.fill(plan, share)
        assert (used.step.tiles_N8 == expected.step.tiles_N8).all() and (used.token_T == expected.token_T).all()
        assert (used.step.position_T == expected.step.position_T).all()
        assert (used.step.horizon_T == expected.step.horizon_T).all()
