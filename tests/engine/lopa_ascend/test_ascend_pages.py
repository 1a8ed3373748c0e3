"""Pages of the Ascend engine, without a device: every row finds what was committed, nothing leaks, the pool suffices.

A memory of (request, position, token) stands in for the KV: rows write their window into their slots, as the device
does, and what a row would read must be what its request committed.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import DecodeConfig
from common.decoding import (
    GenerationRequest,
    Int,
    PredictionOrder,
    Predictions,
    Room,
    RowField,
    Scheduler,
    StepPlan,
    rows_by_rank,
)
from common.errors import EngineError
from common.runtime import PagePool
from lopa_ascend.kv import PAGE_SIZE, BranchCapacity, PageBook, most_pages
from lopa_ascend.steps import FlatStep, lay_out, most_reads, read_entries

MASK, EOS, VOCAB = 5, 6, 50
NOTHING = (-1, -1, -1)


class Rank:
    """One rank's book, with a memory that remembers who wrote each slot."""

    def __init__(self, num_pages: int) -> None:
        self.book = PageBook(PagePool(num_pages))
        self.copies: list[tuple[int, int]] = []
        self.memory: list[tuple[int, int, int]] = [NOTHING] * (num_pages * PAGE_SIZE)

    def step(self, plan: StepPlan, rows: np.ndarray) -> FlatStep:
        flat = lay_out(plan, rows, self.book)
        self.copies = flat.copies
        for source, target in flat.copies:
            page = self.memory[source * PAGE_SIZE : (source + 1) * PAGE_SIZE]
            self.memory[target * PAGE_SIZE : (target + 1) * PAGE_SIZE] = page
        assert len(set(flat.entries_3T[2].tolist())) == flat.num_tokens, "slots are unique"
        return flat


class RandomModel:
    """common.decoding.engine.Engine of random predictions over the books of `num_ranks` branch-parallel ranks."""

    def __init__(self, num_ranks: int, num_pages: int, seed: int) -> None:
        self.ranks = [Rank(num_pages) for _ in range(num_ranks)]
        self.rng = np.random.default_rng(seed)
        self.committed: dict[int, list[int]] = {}  # slot -> tokens

    def forward(self, plan: StepPlan) -> Predictions:
        for slot in set(plan.slot_R[plan.step_R == 0].tolist()):
            self.committed[slot] = []
        rows_of = rows_by_rank(plan, len(self.ranks))
        for rank, rows in zip(self.ranks, rows_of, strict=True):
            self.check(rank, plan, rows, rank.step(plan, rows))
            rank.book.prepare_commits(plan)
        most = most_reads(plan, rows_of)
        shape = plan.token_T.shape
        token_T = self.rng.integers(EOS + 1, VOCAB, shape)
        token_T[self.rng.random(shape) < 0.01] = EOS
        random = self.rng.random(shape, dtype=np.float32)
        expected = np.stack((token_T.astype(np.float32), random, random), axis=-1)
        order = PredictionOrder(plan.num_tokens, read_entries(plan, rows_of), most)
        found = order.predictions(self.gathered(plan, rows_of, expected, most))
        assert np.array_equal(found.token_T[plan.is_read_T], token_T[plan.is_read_T])
        return found

    def gathered(self, plan: StepPlan, rows_of: list[np.ndarray], expected: np.ndarray, most: int) -> np.ndarray:
        """What each rank's head would have gathered, in the order of its rows."""
        gathered = np.zeros((len(rows_of), most, 3), dtype=np.float32)
        for rank, rows in enumerate(rows_of):
            entries = plan.entries_of(rows)
            values = expected[entries[plan.is_read_T[entries]]]
            gathered[rank, : len(values)] = values
        return gathered

    def check(self, rank: Rank, plan: StepPlan, rows: np.ndarray, flat: FlatStep) -> None:
        """Write the window as the device does, then read what attention would."""
        starts = [0, *flat.query_ends[:-1]]
        for start, end, length, pages in zip(
            starts, flat.query_ends, flat.kv_lengths, flat.table_VP.tolist(), strict=True
        ):
            for token, position, slot in flat.entries_3T[:, start:end].T:
                if slot // PAGE_SIZE in pages[: -(-length // PAGE_SIZE)]:
                    rank.memory[slot] = (0, int(position), int(token))
        for row in rows.tolist():
            self.check_row(rank, plan, row)

    def check_row(self, rank: Rank, plan: StepPlan, row: int) -> None:
        slot, start, end = int(plan.slot_R[row]), int(plan.start_R[row]), int(plan.start_R[row] + plan.num_keys_R[row])
        held = rank.book.pages_of(slot)
        tail = held.tails[self.place_of(plan, rank, row)]
        pages = held.shared + tail
        seen = [rank.memory[pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE][1:] for at in range(end)]
        wanted = [*self.committed[slot], *tokens_of(plan, row, end - start)]
        assert seen == list(enumerate(wanted))

    def place_of(self, plan: StepPlan, rank: Rank, row: int) -> int:
        own = rows_by_rank(plan, len(self.ranks))[self.ranks.index(rank)]
        return int((plan.slot_R[own[own < row]] == plan.slot_R[row]).sum())

    def commit(self, plan: StepPlan) -> None:
        for span in plan.commits:
            row = int(np.flatnonzero(plan.request_R == span.request)[0])
            self.committed[span.slot] += tokens_of(plan, row, span.length)
        for rank in self.ranks:
            rank.book.commit()


def tokens_of(plan: StepPlan, row: int, count: int) -> list[int]:
    """The first of the row's."""
    first = plan.first_R[row]
    return plan.token_T[first : first + count].tolist()


def pages_in_use(book: PageBook) -> set[int]:
    return set().union(*(held.pages for held in book._requests.values()))


@st.composite
def cases(draw: st.DrawFn) -> tuple[DecodeConfig, list[int], int, int]:
    size = draw(st.sampled_from([8, 32]))
    decode = DecodeConfig(
        num_lookahead=draw(st.integers(0, 7)),
        block_size=size,
        max_new_tokens=size * draw(st.integers(1, 6)),
        block_add_threshold=draw(st.sampled_from([0.0, 0.1, 0.8])),
        skip_threshold=draw(st.sampled_from([0.3, 0.8])),
        window_attention="block_causal",
        shift_row=draw(st.sampled_from(["stale", "fresh"])),
    )
    prompt_lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))
    return decode, prompt_lengths, draw(st.integers(1, 4)), draw(st.integers(0, 99))


@pytest.mark.slow
@settings(max_examples=40)
@given(cases())
def test_every_row_reads_what_was_committed_and_no_page_leaks(case: tuple[DecodeConfig, list[int], int, int]) -> None:
    decode, prompt_lengths, num_ranks, seed = case
    num_slots = 3
    pools = (BranchCapacity(num_slots, 999, count, num_ranks) for count in range(1, 999))
    capacity = next(pool for pool in pools if all(pool.can_hold([Room(length, decode)]) for length in prompt_lengths))
    model = RandomModel(num_ranks, capacity.num_pages, seed)
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=num_slots)
    waiting = [GenerationRequest(str(n), (n + 10,) * length) for n, length in enumerate(prompt_lengths)]
    num_finished = 0
    while scheduler.active or waiting:
        while waiting and scheduler.has_free_slot:
            if not capacity.can_hold([*scheduler.rooms(), scheduler.room_of(waiting[0])]):
                break
            scheduler.admit(waiting.pop(0))
        plan = scheduler.plan_step()
        winners = scheduler.select_winners(model.forward(plan))
        model.commit(plan)
        num_finished += len(scheduler.advance(winners))
        for rank in model.ranks:
            pool, in_use = rank.book.pool, pages_in_use(rank.book)
            assert len(in_use) == sum(len(held.pages) for held in rank.book._requests.values()), "shared by accident"
            assert pool.num_used == len(in_use) + len(rank.book._dummies)
    assert num_finished == len(prompt_lengths)


def test_a_commit_renames_pages_and_only_rows_that_join_are_given_a_copy() -> None:
    model, copies = RandomModel(1, 40, seed=1), []
    decode = DecodeConfig(
        num_lookahead=3, block_size=32, max_new_tokens=192, window_attention="block_causal", skip_threshold=0.6,
        block_add_threshold=0.0,
    )  # fmt: skip
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=None)
    scheduler.admit(GenerationRequest("0", (9,) * 100))
    book = model.ranks[0].book
    num_tails = 1
    while scheduler.active:
        plan = scheduler.plan_step()
        winners = scheduler.select_winners(model.forward(plan))
        copies.append(len(model.ranks[0].copies))
        assert copies[-1] <= max(0, plan.num_rows - num_tails)
        before = book.pages_of(0)
        model.commit(plan)
        after = book.pages_of(0)
        if plan.commits:
            assert set(after.shared) - set(before.shared) <= set(before.tails[0]), "a full page was one row's own"
            num_new = len(after.shared) - len(before.shared)
            assert after.tails == tuple(tail[num_new:] for tail in before.tails[: plan.num_rows])
        num_tails = len(after.tails)
        scheduler.advance(winners)
    assert len(book.pages_of(0).shared) == (100 + 192) // PAGE_SIZE
    assert copies[1] == 3, "the first step had one row, the second has four"


def test_a_pool_that_runs_dry_in_the_middle_of_a_step_loses_no_page() -> None:
    decode = DecodeConfig(num_lookahead=0, block_size=32, max_new_tokens=32, window_attention="block_causal")
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=3)
    book = PageBook(PagePool(8))
    scheduler.admit(GenerationRequest("0", (9,) * 200))
    plan = scheduler.plan_step()
    book.open_step(plan, np.arange(plan.num_rows))
    held, used = book.pages_of(0), book.pool.num_used
    for name in "12":
        scheduler.admit(GenerationRequest(name, (9,) * 300))
    plan = scheduler.plan_step()._replace(row_fields_8R=_going_on(scheduler.plan_step().row_fields_8R))
    with pytest.raises(EngineError, match="all 8 KV pages are in use"):
        book.open_step(plan, np.arange(plan.num_rows))
    assert (book.pages_of(0), book.pool.num_used) == (held, used)
    assert set(book._requests) == {0}


def _going_on(row_fields_8R: Int) -> Int:
    """The first request is in its second step."""
    fields = row_fields_8R.copy()
    fields[RowField.STEP, 0] = 1
    return fields


@pytest.mark.parametrize(("num_ranks", "needed"), [(1, 7 + 8 * 3), (4, 7 + 2 * 3), (16, 7 + 3)])
def test_what_a_request_needs_at_most(num_ranks: int, needed: int) -> None:
    """1000 prompt tokens fill 7 pages; the rest of 1256 positions takes 3 more for each row of a rank."""
    decode = DecodeConfig(num_lookahead=7, max_new_tokens=256, window_attention="block_causal")
    assert most_pages(Room(1000, decode), num_ranks) == needed
    capacity = BranchCapacity(4, 4096, 2 * needed + 1, num_ranks)
    assert capacity.can_hold([Room(1000, decode)] * 2)
    assert not capacity.can_hold([Room(1000, decode)] * 3)
