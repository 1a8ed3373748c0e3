"""What one request brings about ends that request, with a sentence; the others get the tokens they get without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from test_core import HashedEngine, Wire, alone, core_of, heard_by_rank_1, request, run, told

from common.config import DecodeConfig
from common.constraints import Automaton
from common.decoding import (
    HOLE,
    Capacity,
    Completion,
    EngineCore,
    GenerationRequest,
    Predictions,
    Rejection,
    StepPlan,
    StepRecord,
)
from common.decoding.scheduling import by_request
from common.decoding.scheduling.requests import Requests
from common.decoding.scheduling.scheduler import noise_key
from common.decoding.scheduling.state import DecodingRequest
from common.errors import EngineError
from common.policies import registry
from common.processes import Mesh

BAD = "bad"
ANYTHING = Automaton(
    np.ones(99, np.int32), np.array([[-1, 0]], np.int32), np.ones(1, np.bool_), 0, "any", may_end=False
)


class Spoilt(HashedEngine):
    """Gives some entry of the requests of these names no number, from a step on."""

    capacity = Capacity(num_slots=6, max_model_len=100, vocab_size=99)

    def __init__(
        self, *names: str, step: int = 2, which: int = 1, value: float = np.nan, mesh: Mesh | None = None
    ) -> None:
        super().__init__(mesh)
        self._keys = [noise_key(0, name) for name in names]
        self._step, self._which, self._value = step, which, value

    def forward(self, plan: StepPlan) -> Predictions:
        predictions = super().forward(plan)
        is_bad_R = np.isin(plan.noise_key_R, self._keys) & (plan.step_R >= self._step)
        entry_T = (is_bad_R.repeat(plan.num_entries_R) & plan.is_read_T).nonzero()[0]
        predictions.values_3T[self._which, entry_T[-1:]] = self._value
        return predictions


class Broken(HashedEngine):
    """Nothing is a number, whoever asks."""

    def forward(self, plan: StepPlan) -> Predictions:
        return Predictions(super().forward(plan).values_3T * np.float32(np.nan))


def failed_beside_others(core: EngineCore, bad: GenerationRequest, num_others: int) -> Rejection:
    """Return how the request ends; the others have the tokens that they have alone."""
    others = [request(f"other {n}", max_new_tokens=24) for n in range(num_others)]
    for one in (*others[:2], bad, *others[2:]):
        core.add_request(one)
    results = run(core)
    failed = results.pop(bad.id)
    assert isinstance(failed, Rejection)
    assert set(results) == {one.id for one in others}
    for one in others:
        result, wanted = results[one.id], alone(one)
        assert isinstance(result, Completion)
        assert (result.token_ids, result.num_forwards) == (wanted.token_ids, wanted.num_forwards)
    return failed


@pytest.mark.parametrize("num_others", [0, 1, 5])
@pytest.mark.parametrize(("which", "value"), [(1, np.nan), (1, np.inf), (2, -np.inf), (0, np.nan)])
@pytest.mark.parametrize("step", [0, 2])
def test_what_is_no_number_ends_its_request_and_the_others_keep_their_tokens(
    num_others: int, which: int, value: float, step: int
) -> None:
    core = core_of(Spoilt(BAD, which=which, value=value, step=step))
    failed = failed_beside_others(core, request(BAD, max_new_tokens=24), num_others)
    assert failed.finish_reason == "error"
    assert failed.reason.startswith("the model's output is not finite for this request: its weights")
    assert sorted(core.scheduler._free_slots) == [*range(6)] and not core.scheduler._failures
    core.add_request(request("later"))
    assert isinstance(run(core)["later"], Completion)


def test_a_request_that_is_drawn_is_told_to_look_at_its_settings_first() -> None:
    core = core_of(Spoilt(BAD))
    core.add_request(request("greedy"))
    core.add_request(request(BAD, temperature=0.5))
    results = run(core)
    assert isinstance(results["greedy"], Completion)
    failed = results[BAD]
    assert isinstance(failed, Rejection) and "drawn with temperature 0.5" in failed.reason
    assert "send it with temperature 0" in failed.reason


def test_a_client_whose_requests_all_fail_does_not_end_the_engine() -> None:
    names = [f"{BAD} {n}" for n in range(30)]
    core = core_of(Spoilt(*names, step=0))
    for name in names:
        core.add_request(request(name))
        assert isinstance(run(core)[name], Rejection)
    core.add_request(request("good"))
    assert isinstance(run(core)["good"], Completion)


def test_an_engine_that_has_a_number_for_nobody_tells_its_requests_and_ends() -> None:
    core, outputs = core_of(Broken()), []
    for name in ("a", "b", "c", "waits"):
        core.add_request(request(name))
    with pytest.raises(
        EngineError, match=r"rank 0, step 1: .* not even for a prompt of one token: its weights hold NaN"
    ):
        while core.has_work:
            outputs += core.step()
    assert {output.id for output in outputs} == {"a", "b", "c"}
    assert all(isinstance(output.result, Rejection) for output in outputs)


def test_nobody_is_told_of_the_engines_own_request() -> None:
    seen: list[StepRecord] = []
    core = core_of(Spoilt(BAD, step=1), observer=seen.append)
    core.add_request(request(BAD))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert {output.id for output in outputs} == {BAD}
    core.scheduler.observe(seen.append, {BAD})
    core.add_request(request(BAD))
    assert set(run(core)) == {BAD}
    assert [record.request_id for record in seen if record.request_id == BAD] == [BAD, BAD], "failed steps are no steps"


@pytest.mark.parametrize("names", [(BAD,), (BAD, "a", "b", "c")])
def test_all_ranks_decide_the_same(names: tuple[str, ...]) -> None:
    wire = Wire()
    leader = core_of(Spoilt(*names, step=1, mesh=Mesh(bp_size=2, relay=wire)))
    for name in ("a", BAD, "b", "c"):
        leader.add_request(request(name))
    said = []
    while leader.has_work:
        said.append(told(leader.step()))
    leader.end()
    assert heard_by_rank_1(wire.said, lambda mesh: Spoilt(*names, step=1, mesh=mesh)) == [*said, []]
    assert {name for outputs in said for name, _, is_end in outputs if is_end} == {"a", BAD, "b", "c"}


Decide = Callable[..., Any]
POLICIES = {
    "branch_score": ("branch_scores", "score"),
    "spawn_rule": ("spawn_rules", "rank"),
    "lookahead_rule": ("lookahead_rules", "count"),
    "fill_rule": ("fill_rules", "choose"),
}


def raising(given: Any) -> Any:
    raise ZeroDivisionError("a policy of somebody else's")


def not_a_number(given: Any) -> Any:
    return np.full(len(given.branches), np.nan)


@pytest.mark.parametrize("num_others", [1, 5])
@pytest.mark.parametrize(
    ("setting", "decide"), [*((name, raising) for name in POLICIES), ("branch_score", not_a_number)]
)
def test_a_policy_that_fails_ends_the_requests_that_have_it(
    setting: str, decide: Decide, num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = POLICIES[setting]

    class Point:
        def load(self) -> Decide:
            return decide

    installed = {folder: {"foreign": Point()}}
    monkeypatch.setattr(registry, "_installed", lambda folder: installed.get(folder, {}))
    registry.policy.cache_clear()
    engine = Spoilt()
    engine.capacity = Capacity(num_slots=3 if setting == "fill_rule" else 6, max_model_len=100, vocab_size=99)
    failed = failed_beside_others(core_of(engine), request(BAD, **{setting: "foreign"}), num_others)
    assert failed.finish_reason == "error" and "foreign: the policy failed" in failed.reason
    registry.policy.cache_clear()


@pytest.mark.parametrize("num_others", [1, 5])
@pytest.mark.parametrize("fails_at", ["made", "asked"])
def test_a_stop_finder_that_fails_ends_its_request(num_others: int, fails_at: str) -> None:
    class Search:
        num_seen = 0

        def find(self, more_ids: Sequence[int], is_over: bool) -> int | None:
            raise OverflowError("no such token")

    def stop_finder(decode: DecodeConfig) -> Any:
        if decode.stop and fails_at == "made":
            raise UnicodeError("no such text")
        return Search if decode.stop else None

    failed = failed_beside_others(core_of(Spoilt(), stop_finder=stop_finder), request(BAD, stop=("x",)), num_others)
    assert failed.finish_reason == ("rejected" if fails_at == "made" else "error")


def test_a_request_that_cannot_even_be_judged_is_rejected_alone() -> None:
    core = core_of(HashedEngine())
    core.add_request(request("good"))
    core.add_request(GenerationRequest(BAD, None))  # type: ignore[arg-type]
    core.add_request(GenerationRequest("worse", (5,), decode={"top_p": 1}))  # type: ignore[arg-type]
    core.add_request(GenerationRequest("worst", (5,), seed=10**5000))  # which cannot be written as text
    core.add_request(GenerationRequest("negative", (5,), num_logprobs=-1))
    core.add_request(GenerationRequest("odd", (5,), canvas=(10**6,), automaton=ANYTHING))
    core.add_request(GenerationRequest("free", (5,), canvas=(HOLE,) * 100))
    results = run(core)
    assert isinstance(results.pop("good"), Completion)
    assert len(results) == 6 and all(isinstance(result, Rejection) for result in results.values())
    assert sorted(core.scheduler._free_slots) == [0, 1, 2]


def test_a_request_that_fails_as_it_begins_is_rejected_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often: what it took is free again."""
    add = Requests.add

    def failing(requests: Requests, decoding: DecodingRequest) -> None:
        add(requests, decoding) if decoding.request.id == "good" else raising(None)

    monkeypatch.setattr(Requests, "add", failing)
    core = core_of(HashedEngine())
    for name in (*"abcdef", "good"):
        core.add_request(request(name))
    results = run(core)
    assert isinstance(results.pop("good"), Completion)
    assert len(results) == 6 and all(isinstance(result, Rejection) for result in results.values())
    assert sorted(core.scheduler._free_slots) == [0, 1, 2] and not core.scheduler.rooms()


@pytest.mark.parametrize("num_others", [1, 5])
def test_records_are_made_of_the_requests_that_somebody_looks_at(
    num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who looks at one request must not cost the others anything."""
    made: list[str] = []

    def counted(record: Any = by_request.StepRecord, **fields: Any) -> StepRecord:
        made.append(fields["request_id"])
        return record(**fields)  # type: ignore[no-any-return]

    monkeypatch.setattr(by_request, "StepRecord", counted)
    core, seen, ids = core_of(Spoilt()), [], {"seen"}
    core.scheduler.observe(seen.append, ids)
    for name in ("seen", *(f"other {n}" for n in range(num_others))):
        core.add_request(request(name))
    results = run(core)
    assert set(made) == {"seen"} and len(made) == len(seen) == results["seen"].num_forwards
    ids.add("added later")
    core.add_request(request("added later"))
    core.add_request(request("nobody's"))
    run(core)
    assert {record.request_id for record in seen} == {"seen", "added later"}
