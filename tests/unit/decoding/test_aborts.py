"""An abort ends the request that was open when it was asked for, wherever it waited, and no other; on any number of
ranks. Ids may be used again."""

from __future__ import annotations

from typing import Any

import pytest
from abort_storms import storm_in_processes, storm_in_threads
from test_core import HashedEngine, Replay, Wire, alone, core_of, request, run, told

from common.decoding import Completion, EngineCore, GenerationRequest, Scheduler, decode_requests
from common.decoding.request import RequestQueue
from common.processes import Mesh

LONG = {"max_new_tokens": 32, "stop_at_eos": False, "skip_threshold": 1.0}
NAMES = ("a", "b", "c", "told", "told too", "and this", "untold", "untold too")


def leader(wire: Wire) -> EngineCore:
    return core_of(HashedEngine(Mesh(bp_size=2, relay=wire)))


def aborted(core: EngineCore) -> dict[str, bool]:
    return {name: result.finish_reason == "abort" for name, result in run(core).items()}


@pytest.mark.parametrize("is_led", [False, True])
def test_whatever_waits_is_aborted_before_it_begins(is_led: bool) -> None:
    """Three are decoded; on several ranks the others know three more, and the rest lies with rank 0 alone."""
    wire, engine = Wire(), HashedEngine()
    core = leader(wire) if is_led else core_of(engine)
    for name in NAMES:
        core.add_request(request(name, **LONG))
    said = [told(core.step()), told(core.step())]
    for name in NAMES[1:]:
        core.abort(name)
    outputs = core.step()
    said.append(told(outputs))
    ended = {output.id: output.result for output in outputs if output.result is not None}
    assert set(ended) == set(NAMES[1:])
    assert all(isinstance(result, Completion) and result.finish_reason == "abort" for result in ended.values())
    assert core.num_waiting == 0 and [decoding.request.id for decoding in core.scheduler.active] == ["a"]
    assert aborted(core) == {"a": False}
    if is_led:
        core.end()
        follower = core_of(HashedEngine(Mesh(rank=1, bp_rank=1, bp_size=2, relay=Replay(wire.said))))
        passes = [told(follower.step()) for _ in range(len(wire.said))]
        assert not follower.has_work and not follower.scheduler.active and not follower.num_waiting
        ends = {name for outputs in passes for name, _, is_end in outputs if is_end}
        assert ends == {*NAMES[:6]}, "of the others it has never heard"


@pytest.mark.parametrize("is_led", [False, True])
def test_an_abort_of_what_has_ended_ends_no_later_request_of_that_id(is_led: bool) -> None:
    core = leader(Wire()) if is_led else core_of(HashedEngine())
    for _ in range(3):
        core.add_request(request("a"))
        result = run(core)["a"]
        assert isinstance(result, Completion) and result.finish_reason != "abort"
        assert result.token_ids == alone(request("a")).token_ids
        core.abort("a")


def test_an_abort_that_comes_with_the_end_ends_no_later_request_of_that_id() -> None:
    """Between the two steps, of which the second finds that the request has ended by itself."""
    wanted, core = alone(request("a")), core_of(HashedEngine())
    core.add_request(request("a"))
    for _ in range(wanted.num_forwards):
        assert not any(output.result for output in core.step())
    core.abort("a")
    (output,) = core.step()
    assert isinstance(output.result, Completion) and output.result.finish_reason == wanted.finish_reason
    core.add_request(request("a"))
    result = run(core)["a"]
    assert isinstance(result, Completion) and result.token_ids == wanted.token_ids


def test_an_id_that_was_aborted_may_be_added_again_at_once() -> None:
    core = core_of(HashedEngine())
    for name in NAMES:
        core.add_request(request(name, **LONG))
    core.step()
    for name in ("a", "untold"):
        core.abort(name)
        with pytest.raises(ValueError, match="is being decoded already"):
            core.add_request(request(name))  # until the step has told of its end
    core.step()
    for name in ("a", "untold"):
        core.add_request(request(name, **LONG))
    assert not any(aborted(core).values())


def test_an_input_that_gives_an_open_id_again_has_ended_there() -> None:
    names = ["a", "b", "a", "c"]
    scheduler = Scheduler(request("a", **LONG).decode, mask_token_id=1, eos_token_id=2, num_slots=3)  # type: ignore[arg-type]
    done: list[str] = []
    with pytest.raises(ValueError, match="request a is being decoded already"):
        done += [result.id for result in decode_requests((request(name) for name in names), scheduler, HashedEngine())]  # type: ignore[arg-type]
    queue = RequestQueue(request(name) for name in names)
    assert [one.id for one in queue.release(9)] == ["a", "b"] and not queue.is_over
    with pytest.raises(ValueError, match="request a is being decoded already"):
        queue.raise_failure()


def test_a_queue_tells_of_its_requests_in_their_order_and_each_once() -> None:
    queue = RequestQueue([request("from an input")])
    for name in ("a", "b", "c"):
        queue.add(request(name))
    assert [one.id for one in queue.release(2)] == ["a", "b"] and not queue.release(2)
    assert queue.remove("a") == request("a") and queue.remove("c") == request("c") and queue.remove("a") is None
    assert [one.id for one in queue.release(2)] == ["from an input"]
    assert [one.id for one in queue] == ["b", "from an input"] and len(queue) == 2
    for name in ("b", "from an input"):
        first = queue.first()
        assert first is not None and first.id == name
        queue.take()
    assert queue.first() is None and not queue.release(1) and queue.is_over


def test_a_waiting_request_is_judged_once_for_each_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    core, judged = core_of(HashedEngine()), []
    monkeypatch.setattr(
        EngineCore, "why_impossible", lambda self, one: judged.append(one.id) or ("never" if one.id == "no" else None)
    )
    for name in (*NAMES, "no"):
        core.add_request(request(name))
    results = run(core)
    assert sorted(judged) == sorted((*NAMES, "no")) and results["no"].finish_reason == "rejected"


def test_adding_looks_at_nothing_that_grows_with_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(HashedEngine())

    def refuse(*_: Any) -> Any:
        raise AssertionError("all requests have been looked at")

    monkeypatch.setattr(type(core.scheduler), "active", property(refuse))
    monkeypatch.setattr(RequestQueue, "__iter__", refuse)
    for n in range(100):
        core.add_request(GenerationRequest(str(n), (5,)))
    assert core.num_waiting == 100


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_storm_of_aborts_loses_none_and_hits_no_other(num_ranks: int) -> None:
    counts = storm_in_threads(num_ranks, 150, seed=num_ranks)
    assert min(counts[kind] for kind in ("late", "of one that waits", "of one being decoded", "whole", "aborted")) > 3


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_storm_of_2000_aborts_over_processes(num_ranks: int) -> None:
    counts = storm_in_processes(num_ranks, 2000, seed=num_ranks)
    assert counts["asked"] >= 2000
