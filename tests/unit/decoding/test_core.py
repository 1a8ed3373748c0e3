"""Requests that come and go while others are being decoded, and what each step tells of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import DecodeConfig
from common.decoding import (
    Capacity,
    Command,
    Completion,
    EngineCore,
    GenerationRequest,
    Predictions,
    Rejection,
    RequestOutput,
    Scheduler,
    StepPlan,
    decode_requests,
)
from common.errors import EngineError
from common.processes import Mesh

DECODE = DecodeConfig(num_lookahead=2, block_size=4, max_new_tokens=16)
MASK, EOS = 1, 2


class HashedEngine:
    """Predictions that depend on nothing but each entry's row: its tokens, its place and its step."""

    capacity = Capacity(num_slots=3, max_model_len=100, vocab_size=99)

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh or Mesh()
        self.num_passes = 0

    def forward(self, plan: StepPlan) -> Predictions:
        self.num_passes += 1
        values_3T = np.zeros(plan.entries_3T.shape, dtype=np.float32)
        for row in range(plan.num_rows):
            count = int(plan.num_keys_R[row])
            own = slice(int(plan.first_R[row]), int(plan.first_R[row]) + count)
            seed = (plan.token_T[own].sum(), plan.start_R[row], plan.step_R[row])
            rng = np.random.default_rng([int(number) for number in seed])
            values_3T[0, own] = rng.integers(EOS, 20, count)
            values_3T[1:, own] = rng.random((2, count))
        return Predictions(values_3T)

    def commit(self, plan: StepPlan, winner_row_of_request: np.ndarray) -> None:
        pass


def core_of(engine: Any, **changes: Any) -> EngineCore:
    scheduler = Scheduler(DECODE, mask_token_id=MASK, eos_token_id=EOS, num_slots=engine.capacity.num_slots, **changes)
    return EngineCore(scheduler, engine)


def request(name: str, **changes: Any) -> GenerationRequest:
    decode = DecodeConfig(**{**DECODE.model_dump(), **changes}) if changes else None
    return GenerationRequest(name, tuple(3 + ord(letter) % 90 for letter in name), decode)


def run(core: EngineCore) -> dict[str, Completion | Rejection]:
    results = {}
    while core.has_work:
        for output in core.step():
            if output.result is not None:
                results[output.id] = output.result
    return results


def alone(wanted: GenerationRequest) -> Completion:
    core = core_of(HashedEngine())
    core.add_request(wanted)
    (result,) = run(core).values()
    assert isinstance(result, Completion)
    return result


def test_a_new_core_has_nothing_to_do_and_says_so() -> None:
    core = core_of(HashedEngine())
    assert not core.has_work and core.step() == [] and not core.has_work


@pytest.mark.parametrize("stop_at_eos", [True, False])
def test_what_steps_tell_of_a_request_is_its_answer_in_order(stop_at_eos: bool) -> None:
    names = ["one", "two", "three", "four", "five", "sixth"]
    core = core_of(HashedEngine())
    for name in names:
        core.add_request(request(name, stop_at_eos=stop_at_eos, max_new_tokens=32))
    parts_of: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    results = {}
    while core.has_work:
        for output in core.step():
            parts_of[output.id].append(output.token_ids)
            if output.result is not None:
                assert output.id not in results
                results[output.id] = output.result
    assert set(results) == set(names)
    assert any(len(parts) > 2 for parts in parts_of.values())
    for name, parts in parts_of.items():
        assert all(parts[:-1]), "a step without new tokens tells nothing until the end"
        assert sum(parts, ()) == results[name].token_ids


def test_each_request_has_its_own_settings_and_gets_the_tokens_it_gets_alone() -> None:
    requests = [
        request("plain"),
        request("without lookahead", num_lookahead=0),
        request("long", max_new_tokens=40, num_lookahead=5),
        request("other blocks", block_size=8, skip_threshold=0.5),
        request("goes on behind the end", stop_at_eos=False),
        request("another rule", strategy={"name": "fast_dllm", "cache": "dual"}),
        GenerationRequest("another seed", (5, 6, 7), seed=9),
    ]
    core = core_of(HashedEngine())
    for one in requests:
        core.add_request(one)
    results = run(core)
    for one in requests:
        result, wanted = results[one.id], alone(one)
        assert isinstance(result, Completion)
        assert (result.token_ids, result.num_forwards) == (wanted.token_ids, wanted.num_forwards)
    assert results["long"].num_canvas_tokens > results["plain"].num_canvas_tokens


@pytest.mark.parametrize("most", [1, 5, 15, 16, 40])
def test_an_answer_is_cut_at_its_length_as_soon_as_that_is_final(most: int) -> None:
    wire, whole = Wire(), request("a", max_new_tokens=32, stop_at_eos=False)
    leader = core_of(HashedEngine(Mesh(bp_size=2, relay=wire)))
    leader.add_request(replace(whole, max_tokens=most))
    said = []
    while leader.has_work:
        said += leader.step()
    leader.end()
    result, uncut = said[-1].result, alone(whole)
    assert isinstance(result, Completion)
    assert result.token_ids == sum((output.token_ids for output in said), ()) == uncut.token_ids[:most]
    is_cut = len(uncut.token_ids) > most
    assert result.finish_reason == ("length" if is_cut else uncut.finish_reason)
    assert result.num_forwards < uncut.num_forwards or not is_cut
    follower = core_of(HashedEngine(Mesh(rank=1, bp_rank=1, bp_size=2, relay=Replay(wire.said))))
    heard = []
    while follower.has_work:
        heard += follower.step()
    assert told(heard) == told(said) and heard[-1].result.token_ids == result.token_ids  # type: ignore[union-attr]


@pytest.mark.parametrize("most_tokens", [None, 6])
@pytest.mark.parametrize(("name", "value"), [("sampling_strategy", "margin"), ("window_attention", "block_causal")])
def test_settings_that_cannot_share_a_pass_reject_their_request_alone(
    name: str, value: Any, most_tokens: int | None
) -> None:
    core = core_of(HashedEngine(), max_num_batched_tokens=most_tokens)
    core.add_request(request("good"))
    core.add_request(request("bad", **{name: value}))
    core.add_request(request("well"))
    results = run(core)
    assert isinstance(results["good"], Completion) and isinstance(results["well"], Completion)
    rejected = results["bad"]
    assert isinstance(rejected, Rejection) and rejected.reason.startswith(f"its {name} {value} cannot share a pass")


def test_stop_strings_that_nothing_can_look_for_reject_their_request_alone() -> None:
    core = core_of(HashedEngine())
    core.add_request(request("good"))
    core.add_request(request("bad", stop=("x",)))
    results = run(core)
    assert isinstance(results["good"], Completion)
    rejected = results["bad"]
    assert isinstance(rejected, Rejection) and "need a tokenizer" in rejected.reason


def test_prompts_begin_over_several_steps_when_they_are_many_tokens() -> None:
    engine = PromptEngine()
    core = core_of(engine, max_num_batched_tokens=10)
    lengths = {"a": 4, "b": 5, "c": 3, "long": 25, "d": 2}
    for name, length in lengths.items():
        core.add_request(GenerationRequest(name, tuple(range(3, 3 + length))))
    results = run(core)
    assert all(isinstance(result, Completion) for result in results.values())
    assert engine.begun == [[4 + 4, 5 + 4], [3 + 4], [25 + 4], [2 + 4]]  # with a block each
    wanted = alone(GenerationRequest("c", (3, 4, 5)))
    assert (results["c"].token_ids, results["c"].num_forwards) == (wanted.token_ids, wanted.num_forwards)


class PromptEngine(HashedEngine):
    """begun: lengths of the prompts that begin in each pass in which any does. Slots for all."""

    capacity = Capacity(num_slots=5, max_model_len=100, vocab_size=99)

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[list[int]] = []

    def forward(self, plan: StepPlan) -> Predictions:
        if lengths := plan.num_entries_R[plan.step_R == 0].tolist():
            self.begun.append(lengths)
        return super().forward(plan)


def test_what_is_decoded_already_cannot_be_added_again() -> None:
    core = core_of(HashedEngine())
    core.add_request(request("a"))
    with pytest.raises(ValueError, match="request a is being decoded already"):
        core.add_request(request("a"))
    core.step()
    with pytest.raises(ValueError, match="request a is being decoded already"):
        core.add_request(request("a"))
    run(core)
    core.add_request(request("a"))
    assert isinstance(run(core)["a"], Completion)


def test_an_aborted_request_ends_at_the_next_step_with_what_it_has() -> None:
    engine = HashedEngine()
    core = core_of(engine)
    for name in ("a", "b", "c", "waits", "waits too"):
        core.add_request(request(name, max_new_tokens=32, stop_at_eos=False, skip_threshold=1.0))
    earlier = [output for _ in range(6) for output in core.step()]
    core.abort("b")
    core.abort("waits too")
    core.abort("was never there")
    outputs = {output.id: output for output in core.step()}
    for name in ("b", "waits too"):
        result = outputs[name].result
        assert isinstance(result, Completion) and result.finish_reason == "abort"
    given = sum((output.token_ids for output in earlier if output.id == "b"), ())
    result = outputs["b"].result
    assert isinstance(result, Completion)
    assert given + outputs["b"].token_ids == result.token_ids and result.num_forwards == 6
    assert [decoding.request.id for decoding in core.scheduler.active] == ["a", "c", "waits"]
    rest, wanted = run(core), alone(request("a", max_new_tokens=32, stop_at_eos=False, skip_threshold=1.0))
    assert set(rest) == {"a", "c", "waits"}
    assert rest["a"].token_ids == wanted.token_ids


def test_nothing_now_is_not_over() -> None:
    def source() -> Iterator[GenerationRequest | None]:
        yield None
        yield request("first")
        for _ in range(30):
            yield None
        yield request("second")

    scheduler = Scheduler(DECODE, mask_token_id=MASK, eos_token_id=EOS, num_slots=3)
    results = list(decode_requests(source(), scheduler, HashedEngine()))  # type: ignore[arg-type]
    assert [result.id for result in results] == ["first", "second"]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.booleans()), max_size=25), st.integers(0, 99))
def test_whoever_comes_and_goes_the_others_get_their_tokens_and_all_slots_come_back(
    events: list[tuple[int, int, bool]], seed: int
) -> None:
    core, wanted, results = core_of(HashedEngine()), {}, {}

    def note(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.result is not None:
                assert output.id not in results
                results[output.id] = output.result

    for number, (num_steps, length, is_aborted) in enumerate(events):
        one = GenerationRequest(str(number), tuple(range(3, 4 + length)), seed=seed)
        wanted[one.id] = one
        core.add_request(one)
        for _ in range(num_steps):
            note(core.step())
        if is_aborted:
            core.abort(str(number // 2))
    while core.has_work:
        note(core.step())
    assert set(results) == set(wanted) and not core.scheduler.active
    assert sorted(core.scheduler._free_slots) == [0, 1, 2]
    for name, result in results.items():
        if isinstance(result, Completion) and result.finish_reason != "abort":
            assert result.token_ids == alone(wanted[name]).token_ids


def told(outputs: list[RequestOutput]) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(output.id, output.token_ids, output.result is not None) for output in outputs]


class Wire:
    """Hands one rank's commands to another, a step later than they were said."""

    def __init__(self) -> None:
        self.said: list[Command] = []

    def exchange(self, command: Command, step: int) -> Command:
        self.said.append(command)
        return command


class Replay:
    def __init__(self, said: list[Command]) -> None:
        self._said = iter(said)

    def exchange(self, command: Command, step: int) -> Command:
        return next(self._said)


def heard_by_rank_1(said: list[Command], engine_on: Callable[[Mesh], Any] = HashedEngine) -> list[Any]:
    """What the steps of rank 1 tell, which raises where it has planned another pass than rank 0."""
    follower, heard = core_of(engine_on(Mesh(rank=1, bp_rank=1, bp_size=2, relay=Replay(said)))), []
    while follower.has_work:
        heard.append(told(follower.step()))
    return heard


def test_a_rank_that_hears_what_rank_0_says_decodes_what_rank_0_decodes() -> None:
    wire = Wire()
    leader = core_of(HashedEngine(Mesh(bp_size=2, relay=wire)))
    for name in ("a", "b", "c", "d"):
        leader.add_request(request(name))
    said = [told(leader.step()) for _ in range(3)]
    leader.abort("c")
    leader.add_request(request("late", max_new_tokens=8))
    while leader.has_work:
        said.append(told(leader.step()))
    leader.end()
    assert heard_by_rank_1(wire.said) == [*said, []]  # the last tells that nothing more will come
    assert {name for outputs in said for name, _, is_end in outputs if is_end} == {"a", "b", "c", "d", "late"}


def test_who_looks_on_rank_0_changes_nothing_that_the_others_do() -> None:
    """Three of four slots' worth of requests, which come and go: as many as are laid out in either way."""
    wire, seen = Wire(), []
    leader = core_of(HashedEngine(Mesh(bp_size=2, relay=wire)))
    leader.scheduler.observe(seen.append, {"b", "e"})
    lengths = {"a": 8, "b": 32, "c": 24, "d": 16, "e": 8}
    for name, length in lengths.items():
        leader.add_request(request(name, max_new_tokens=length, stop_at_eos=False))
    while leader.has_work:
        leader.step()
    leader.end()
    assert {record.request_id for record in seen} == {"b", "e"}
    heard_by_rank_1(wire.said)


def test_a_rank_that_has_planned_another_pass_says_so_within_a_step() -> None:
    wire = Wire()
    leader = core_of(HashedEngine(Mesh(bp_size=2, relay=wire)))
    leader.add_request(request("a"))
    for _ in range(4):
        leader.step()
    mesh = Mesh(rank=1, bp_rank=1, bp_size=2, relay=Replay(wire.said))
    engine = HashedEngine(mesh)
    other = DECODE.model_copy(update={"block_size": 8})
    follower = EngineCore(Scheduler(other, mask_token_id=MASK, eos_token_id=EOS), engine)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="rank 1, step 0: this rank and the first of its replica have planned"):
        for _ in range(4):
            follower.step()
    assert engine.num_passes == 0


def test_passes_are_timed_where_one_follows_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    core, told = core_of(HashedEngine(), clock=lambda: next(clock)), list[float]()
    monkeypatch.setattr(core.scheduler, "took", told.append)
    for name in ("first", "second"):
        core.add_request(request(name))
        while core.has_pass or core.is_decoding or core.num_waiting:
            core.step()
        for _ in range(1000):
            next(clock)
    passes = core.engine.num_passes
    assert passes - 6 <= len(told) < passes and 0 < min(told) <= max(told) < 1000
