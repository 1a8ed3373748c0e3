"""Pages of KV memory: no page has two owners, every request finds what it committed, and all pages come back.

A memory of (position, token) stands in for the KV. An engine of random predictions writes what is committed through
the page table, as a device does, and compares what a pass would read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.config import DecodeConfig
from common.decoding import (
    EngineCore,
    GenerationRequest,
    Int,
    Predictions,
    Rejection,
    Room,
    RowField,
    Scheduler,
    StepPlan,
)
from common.errors import EngineError
from common.processes import Mesh
from common.runtime import PagedCapacity, PagePool, PageTable, pages_for

MASK, EOS, VOCAB = 5, 6, 50
PAGE, MAX_MODEL_LEN = 4, 64
DECODE = DecodeConfig(num_lookahead=1, block_size=4, max_new_tokens=16, skip_threshold=0.5, block_add_threshold=0.1)


class RandomEngine:
    """common.decoding.Engine over pages, with random predictions."""

    mesh = Mesh()

    def __init__(self, num_slots: int, num_pages: int, seed: int = 0) -> None:
        rows_SP = np.zeros((num_slots, pages_for(MAX_MODEL_LEN, PAGE)), dtype=np.int32)
        self.pool = PagePool(num_pages)
        self.table = PageTable(self.pool, rows_SP, PAGE)
        self.prefixes = self.table.prefixes
        self.capacity = PagedCapacity(num_slots, MAX_MODEL_LEN, num_pages, page_size=PAGE, vocab_size=VOCAB)
        self.memory = np.full((num_pages * PAGE, 2), -1)
        self.committed = np.full((num_slots, MAX_MODEL_LEN), -1)
        self.device_SP = rows_SP.copy()
        self.rng = np.random.default_rng(seed)
        self.scheduler: Scheduler | None = None
        self.spoils = False

    def forward(self, plan: StepPlan) -> Predictions:
        if self.table.open_step(plan):
            self.device_SP = self.table.rows_SP.copy()
        for decoding in () if self.scheduler is None else self.scheduler.active:
            if decoding.num_reused and (plan.step_R[plan.slot_R == decoding.slot] == 0).any():
                self.committed[decoding.slot, : decoding.num_reused] = decoding.request.prompt[: decoding.num_reused]
        for slot, cached in set(zip(plan.slot_R.tolist(), plan.cached_R.tolist(), strict=True)):
            self.check(slot, cached)
        self.table.prepare_commits(plan)
        self.check_owners()
        token_T = self.rng.integers(EOS + 1, VOCAB, plan.num_tokens)
        token_T[self.rng.random(plan.num_tokens) < 0.02] = EOS
        probability_T = self.rng.random(plan.num_tokens, dtype=np.float32)
        if self.spoils:
            probability_T[:], self.spoils = np.nan, False
        return Predictions.of(token_T, probability_T, probability_T)

    def check(self, slot: int, cached: int) -> None:
        """The device's copy of the table leads to what the slot's request has committed."""
        position_N = np.arange(cached)
        at_N = self.device_SP[slot, position_N // PAGE] * PAGE + position_N % PAGE
        assert np.array_equal(self.memory[at_N], np.stack((position_N, self.committed[slot, :cached]), axis=1))

    def check_owners(self) -> None:
        held = [self.table.pages_of(slot) for slot in range(self.capacity.num_slots)]
        pages = [page for pages in held for page in pages]
        shared = {page for page in pages if pages.count(page) > 1}
        assert len({*pages}) == self.pool.num_used <= self.pool.num_pages - self.pool.num_idle
        for own in held:
            assert shared.isdisjoint(own[max((n + 1 for n, page in enumerate(own) if page in shared), default=0) :])
        assert self.pool.most_used <= self.pool.num_pages

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        for span in plan.commits:
            first = plan.first_R[winner_row_of_request[span.request]]
            token_N = plan.token_T[first : first + span.length]
            position_N = np.arange(span.start, span.start + span.length)
            self.memory[self.table.positions(span)] = np.stack((position_N, token_N), axis=1)
            self.committed[span.slot, span.start : span.start + span.length] = token_N
        self.prefixes.note(plan, winner_row_of_request)


def core_of(engine: RandomEngine, decode: DecodeConfig = DECODE) -> EngineCore:
    engine.scheduler = Scheduler(
        decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=engine.capacity.num_slots, enable_prefix_caching=True,
        max_num_batched_tokens=64,
    )  # fmt: skip
    return EngineCore(engine.scheduler, engine)


def prompt_of(rng: np.random.Generator) -> tuple[int, ...]:
    """One of few beginnings, so that some are shared."""
    length = int(rng.integers(1, MAX_MODEL_LEN - DECODE.max_new_tokens + 1))
    return (int(rng.integers(7, 10)),) * (length // 2) + tuple(rng.integers(7, VOCAB, length - length // 2).tolist())


@pytest.mark.parametrize(
    "count", [pytest.param(10_000, marks=pytest.mark.slow), 1_000], ids=lambda count: f"{count} prompts"
)
@pytest.mark.parametrize("strategy", [{}, {"reuse_prefix": True}, {"name": "block_diffusion"}], ids=str)
def test_random_prompts_aborts_and_evictions_leak_no_page(strategy: dict[str, Any], count: int) -> None:
    num_slots, rng = 6, np.random.default_rng(1)
    engine = RandomEngine(num_slots, num_slots * pages_for(MAX_MODEL_LEN, PAGE) // 3)
    core = core_of(engine, DECODE.changed({"strategy": strategy, "block_add_threshold": 1.0 if strategy else 0.1}))
    assert engine.scheduler is not None
    alive: set[str] = set()
    reasons: list[str] = []
    number = 0
    while number < count or alive:
        choice = rng.random()
        if choice < 0.4 and len(alive) < 20 and number < count:
            salt = str(rng.integers(2)) if choice < 0.2 else None
            core.add_request(GenerationRequest(str(number), prompt_of(rng), cache_salt=salt))
            alive.add(str(number))
            number += 1
        elif choice < 0.5 and alive:
            core.abort(str(rng.choice(sorted(alive))))
        else:
            reasons += ends(core, alive)
        if not alive and number % 3 == 0:
            engine.prefixes.forget()
    assert set(reasons) >= {"abort", "eos", "length"} and len(reasons) > count // 20
    num_hit, num_queried = engine.scheduler.num_hit, engine.scheduler.num_queried
    assert num_queried > num_hit > num_queried // 20 if strategy else num_hit == num_queried == 0
    core.add_request(GenerationRequest("last", (9,)))
    core.step(), core.step()  # the first pass is computed in the second
    held = [len(engine.table.pages_of(slot)) for slot in range(num_slots)]
    assert sum(held) == engine.pool.num_used <= 1
    core.abort("last")
    core.step()
    engine.prefixes.forget()
    engine.check_owners()
    assert engine.pool.num_used + engine.pool.num_idle <= 1


def ends(core: EngineCore, alive: set[str]) -> list[str]:
    """Why requests end in a step."""
    results = [output.result for output in core.step() if output.result is not None]
    alive -= {result.id for result in results}
    return [result.finish_reason for result in results if not isinstance(result, Rejection)]


def test_what_does_not_fit_waits_and_what_never_fits_is_rejected() -> None:
    engine = RandomEngine(4, 10)
    core = core_of(engine)
    for name, length in (("a", 20), ("b", 8), ("never", 40), ("c", 4)):
        core.add_request(GenerationRequest(name, (9,) * length))
    most_together, results = 0, {}
    while len(results) < 4:
        for output in core.step():
            if output.result is not None:
                results[output.id] = output.result
        most_together = max(most_together, len(core.scheduler.active))
    assert isinstance(results["never"], Rejection) and "do not fit the engine's KV memory" in results["never"].reason
    assert most_together == 1, "9 pages, then 6 and 5 of 10"


@pytest.mark.parametrize(
    ("second", "of_prompts", "of_blocks"),
    [
        ((*range(10, 22), 7, 8), 12, 8),  # something of the whole blocks has to be computed
        ((*range(10, 22), 7, 8, 9, 7, 8), 12, 12),
        ((*range(10, 21), 7, 8), 8, 8),  # whole pages
        (tuple(range(10, 30)), 16, 16),  # never the whole prompt
        ((7, *range(10, 30)), 0, 0),
    ],
)
@pytest.mark.parametrize("strategy", [{"reuse_prefix": True}, {"name": "block_diffusion"}], ids=str)
def test_a_prompt_that_begins_like_an_earlier_one_begins_with_its_pages(
    strategy: dict[str, Any], second: tuple[int, ...], of_prompts: int, of_blocks: int
) -> None:
    engine = RandomEngine(2, 40)
    core = core_of(engine, DECODE.changed({"strategy": strategy, "block_add_threshold": 1.0}))
    found = []
    for name, prompt in (("first", tuple(range(10, 30))), ("second", second)):
        core.add_request(GenerationRequest(name, prompt))
        core.step()
        found.append(core.scheduler.active[0].num_reused)
        while core.has_work:
            core.step()
    assert found == [0, of_blocks if "name" in strategy else of_prompts]


def test_a_request_that_failed_leaves_its_pages_to_nobody() -> None:
    engine = RandomEngine(1, 20)
    core = core_of(engine, DECODE.changed({"strategy": {"reuse_prefix": True}}))
    reused = []
    for name in ("first", "spoilt", "next", "last"):
        engine.spoils = name == "spoilt"
        core.add_request(GenerationRequest(name, tuple(range(10, 27))))
        core.step()
        reused.append(core.scheduler.active[0].num_reused)
        while core.has_work:
            core.step()
    assert reused == [0, 16, 0, 16]


def test_capacity_reserves_prompt_and_canvas_in_whole_pages() -> None:
    capacity = PagedCapacity(8, MAX_MODEL_LEN, 11, page_size=PAGE)
    assert capacity.num_reserved([Room(5, DECODE)]) == 6
    assert capacity.can_hold([Room(5, DECODE), Room(4, DECODE)])
    assert not capacity.can_hold([Room(5, DECODE)] * 2)


def test_the_table_is_sent_only_when_it_has_changed() -> None:
    table = RandomEngine(1, 8).table
    scheduler = Scheduler(DECODE, mask_token_id=MASK, eos_token_id=EOS)
    scheduler.admit(GenerationRequest("0", (9,) * 7))
    first = scheduler.plan_step()
    assert not table.open_step(first), "pages are taken when positions become final"
    table.prepare_commits(first)
    assert (len(table.pages_of(0)), first.commits[0].length) == (2, 7)
    fields_8R = first.row_fields_8R.copy()
    fields_8R[RowField.STEP] = 1
    second = first._replace(row_fields_8R=fields_8R, commits=())
    assert [table.open_step(second), table.open_step(second)] == [True, False]


def test_a_request_that_a_plan_leaves_out_is_a_defect_not_garbage() -> None:
    table = PageTable(PagePool(8), np.zeros((2, 8), dtype=np.int32), PAGE)
    scheduler = Scheduler(DECODE, mask_token_id=MASK, eos_token_id=EOS, num_slots=2)
    scheduler.admit(GenerationRequest("0", (9,) * 7))
    first = scheduler.plan_step()
    table.open_step(first)
    table.prepare_commits(first)
    other = first._replace(row_fields_8R=first.row_fields_8R.copy(), commits=(first.commits[0]._replace(slot=1),))
    other.row_fields_8R[RowField.SLOT] = 1
    table.open_step(other)
    table.prepare_commits(other)
    assert (table.pages_of(0), len(table.pages_of(1))) == ([], 2)
    with pytest.raises(AssertionError, match="slot 0 has lost its pages"):
        table.prepare_commits(first._replace(commits=(first.commits[0]._replace(start=7),)))


def test_an_empty_pool_names_the_way_out() -> None:
    pool = PagePool(2)
    pool.take(0), pool.take(1)
    with pytest.raises(EngineError, match=r"all 2 KV pages are in use: admit requests by Capacity\.can_hold"):
        pool.take(0)


def test_a_page_that_is_free_or_anothers_cannot_be_given_back() -> None:
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="page 0 was given back twice"):
        pool.give_back(0, [0])
    page = pool.take(0)
    pool.take(1)
    with pytest.raises(AssertionError, match=f"page {page} is slot 0's: slot 1 cannot give it back"):
        pool.give_back(1, [page])
    with pytest.raises(AssertionError, match=f"page {page} was given back twice"):
        pool.give_back(0, [page, page])
    assert pool.num_used == 1


def test_what_is_undone_is_free_again() -> None:
    pool = PagePool(4)
    kept = pool.take(0)
    pool.undo_from_here()
    pool.take(0), pool.take(1)
    pool.undo()
    assert pool.num_used == 1
    pool.give_back(0, [kept])
