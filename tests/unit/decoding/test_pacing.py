"""A pace takes the way of decoding that brings the most tokens a second at the present load, on every rank the same,
and learns from the requests what each way brings."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from test_core import HashedEngine, Replay, Wire, request

from common.config import DecodeConfig, Pace, Way, paced, ways_of
from common.decoding import (
    Completion,
    EngineCore,
    GenerationRequest,
    Pacer,
    PassCosts,
    Scheduler,
    decode_requests,
    host_seconds,
)
from common.processes import Mesh

COSTS = PassCosts((16, 256, 512, 8192), (5e-3, 5.5e-3, 10e-3, 165e-3))  # of a 7B model on a large GPU, about
DECODE = DecodeConfig(block_size=16, max_new_tokens=64, stop_at_eos=False)
LOADS = (1, 2, 4, 8, 16, 32, 64)
PACES: tuple[Pace, ...] = ("careful", "balanced", "fast")


class Played:
    """Requests of 50 to 150 tokens, so many at once, whose way brings and computes what `truth` says.

    truth: tokens and entries of a pass by way, as shares of what is believed at first. late: seconds of a pass, and of
    a request in it, beyond the costs.
    """

    def __init__(
        self, ways: tuple[Way, ...], truth: dict[str, tuple[float, float]], late: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.late = late
        self.tokens_W = np.array([way.tokens * truth.get(way.name, (1, 1))[0] for way in ways])
        self.entries_W = np.array([way.entries * truth.get(way.name, (1, 1))[1] for way in ways])

    def tokens_per_s(self, way: int | Pacer, loads: list[int], num_passes: int) -> float:
        """loads: for so many passes each."""
        left_S, way_S = np.zeros(max(LOADS)), np.full(max(LOADS), way if isinstance(way, int) else 0)
        rng, seconds, brought = np.random.default_rng(0), 0.0, 0.0
        size_S = left_S.copy()
        for load in np.repeat(loads, num_passes).tolist():
            while (left_S > 0).sum() < load:
                slot = int((left_S <= 0).argmax())
                size_S[slot] = left_S[slot] = 100.0 * rng.uniform(0.5, 1.5)
                if isinstance(way, Pacer):
                    way.admit(slot, is_paced=True)
            slot_N = (left_S > 0).nonzero()[0]
            if isinstance(way, Pacer):
                for slot, own in way.turn(slot_N):
                    way_S[slot] = own
                way.note(slot_N, self.entries_W[way_S[slot_N]])
            took = COSTS.at(self.entries_W[way_S[slot_N]].sum()) + self.late[0] + self.late[1] * load
            if isinstance(way, Pacer):
                way.took(took + (0.5 if rng.random() < 0.05 else 0.0))  # some passes are disturbed
            seconds += took
            tokens_N = np.minimum(self.tokens_W[way_S[slot_N]], left_S[slot_N])
            left_S[slot_N] -= tokens_N
            brought += tokens_N.sum()
            for slot in slot_N[left_S[slot_N] <= 0].tolist():
                if isinstance(way, Pacer):
                    way.end(slot, int(size_S[slot]))
        return brought / seconds


TRUTHS: list[dict[str, tuple[float, float]]] = [
    {},
    dict.fromkeys(("k7", "k3", "k2", "k2_in_turn", "k2_short", "k1_soon"), (0.35, 1.0)),  # bring nothing
    {"k0_in_turn": (1.4, 1.5), "k3": (0.8, 1.2)},
    {"k2_in_turn": (0.6, 1.0), "k2": (1.2, 0.8)},
    # A text that needs no lookaheads.
    {"k7": (1.4, 0.4), "k3": (1.4, 0.4), "k2": (1.6, 0.5), "k1_soon": (1.8, 0.7), "k0_soon": (3.5, 1.2),
     "k0_in_turn": (2.5, 1.6)},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("pace", PACES)
def test_a_pace_is_as_fast_as_its_fastest_way_at_every_load(pace: Pace, truth: dict[str, tuple[float, float]]) -> None:
    """It is at once where ways bring what is believed at first, elsewhere nearly, after some thousand passes."""
    ways = ways_of(DECODE, pace)
    played = Played(ways, truth)
    for load in LOADS:
        pacer = Pacer(ways, COSTS)
        num_passes = max(300, 4000 // load)
        best = max(played.tokens_per_s(way, [load], num_passes) for way in range(len(ways)))
        if truth:
            played.tokens_per_s(pacer, [load], 3000)
        found = played.tokens_per_s(pacer, [load], num_passes)
        assert found > (0.95 if truth else 0.97) * best, (load, found / best)


@pytest.mark.slow
@pytest.mark.parametrize("late", [(0.05, 0.0), (0.0, 0.01), (-2e-3, 0.0)])
@pytest.mark.parametrize("pace", PACES)
def test_what_passes_take_beyond_their_costs_is_learnt(pace: Pace, late: tuple[float, float]) -> None:
    ways = ways_of(DECODE, pace)
    played = Played(ways, {}, late)
    for load, num_passes in ((1, 2000), (8, 600), (64, 300)):
        pacer = Pacer(ways, COSTS)
        best = max(played.tokens_per_s(way, [load], num_passes) for way in range(len(ways)))
        played.tokens_per_s(pacer, [load], num_passes)
        found = played.tokens_per_s(pacer, [load], num_passes)
        assert found > 0.97 * best, (load, found / best)


def test_a_load_that_rises_and_falls_is_followed() -> None:
    ways, loads = ways_of(DECODE, "balanced"), [1, 2, 4, 8, 16, 8, 4, 2, 1]
    played, pacer = Played(ways, {}), Pacer(ways, COSTS)
    found = played.tokens_per_s(pacer, loads, 100)
    fixed = [played.tokens_per_s(way, loads, 100) for way in range(len(ways))]
    assert found > 1.05 * max(fixed), "no way is the best at all of these loads"
    assert pacer.num_steps_W.min() > 0


def test_the_ways_of_a_pace_are_told_apart_by_load() -> None:
    pacer = Pacer(ways_of(DECODE, "fast"), COSTS)
    best = [pacer.names[int(np.argmax(pacer.tokens_per_s(load)))] for load in LOADS]
    assert best[0] == "k3" and best[-1] == "k0_in_turn"
    assert len(dict.fromkeys(best)) >= 3


def test_what_a_request_took_is_told_in_order() -> None:
    pacer = Pacer(ways_of(DECODE, "balanced"), COSTS)
    pacer.admit(0, is_paced=True)
    for load in (1, 1, 64, 64, 64, 1):
        for slot in range(1, load):
            pacer.admit(slot, is_paced=True)
        pacer.turn(np.arange(load))
        pacer.note(np.arange(load), np.full(load, 50.0))
    assert pacer.end(0, 100) == (("k3", 2), ("k0_in_turn", 3), ("k3", 1))


def decoded(pace: Pace, requests: list[GenerationRequest], decode: DecodeConfig = DECODE) -> dict[str, Completion]:
    scheduler = Scheduler(
        paced(decode, pace), mask_token_id=1, eos_token_id=2, num_slots=8, pace=pace, costs=_per_entry(decode)
    )
    done = list(decode_requests(iter(requests), scheduler, HashedEngine()))
    assert all(isinstance(one, Completion) for one in done)
    assert sum(steps for one in done for _, steps in one.ways) == sum(scheduler.steps_by_way().values())
    return {one.id: one for one in done if isinstance(one, Completion)}


def _per_entry(decode: DecodeConfig) -> PassCosts:
    """The first request alone is fastest with lookaheads, several are without."""
    return PassCosts((1, 12 * decode.block_size, 10**6), (1.0, 1.0, 10**6 / (12 * decode.block_size)))


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"block_size": 6, "max_new_tokens": 44},
        {"strategy": "block_diffusion", "window_attention": "block_causal"},
        {"window_attention": "block_causal"},
        {"strategy": "fast_dllm"},
    ],
)
def test_requests_that_change_their_way_fill_their_canvas(pace: Pace, own: dict[str, Any]) -> None:
    decode = DecodeConfig.model_validate({**DECODE.model_dump(), **own})
    done = decoded(pace, [request(str(number)) for number in range(30)], decode)
    assert len(done) == 30 and len({way for one in done.values() for way, _ in one.ways}) > 1
    whole = decode.max_new_tokens // decode.block_size * decode.block_size
    for one in done.values():
        assert one.num_forwards == sum(steps for _, steps in one.ways)
        if one.finish_reason == "length" and not decode.strategy.is_from_zero:
            assert len(one.canvas_token_ids) == whole and one.num_canvas_tokens == whole


def test_a_rank_that_hears_how_long_passes_took_paces_as_rank_0_does() -> None:
    wire, rng, ways = Wire(), np.random.default_rng(0), []
    uneven = accumulate(rng.exponential(10.0) for _ in range(10**6))
    for mesh, clock in (
        (Mesh(bp_size=2, relay=wire), lambda: next(uneven)),
        (Mesh(rank=1, bp_rank=1, bp_size=2, relay=Replay(wire.said)), lambda: 0.0),
    ):
        scheduler = Scheduler(
            paced(DECODE, "fast"), mask_token_id=1, eos_token_id=2, num_slots=3, pace="fast", costs=_per_entry(DECODE),
            clock=clock,
        )  # fmt: skip
        core = EngineCore(scheduler, HashedEngine(mesh))
        for number in range(40 * mesh.is_leader):
            core.add_request(request(str(number)))
        ended = []
        while core.has_work:
            ended += [output.result for output in core.step() if output.result is not None]
        core.end()
        ways.append([(one.id, one.ways) for one in ended])
    assert ways[0] == ways[1] and len({way for _, own in ways[0] for way, _ in own}) > 2


def test_a_request_that_sets_its_pace_keeps_it() -> None:
    decode = paced(DECODE, "balanced")
    own = decode.model_copy(update={"num_lookahead": 2})
    asked = [GenerationRequest(str(number), (5, 6, 7), decode=own) for number in range(4)]
    asked += [GenerationRequest(f"as the run {number}", (5, 6, 7), keeps_pace=True) for number in range(4)]
    done = decoded("balanced", [*asked, *(request(f"r{number}") for number in range(4))])
    assert all(done[one.id].ways == () for one in asked) and done["r0"].ways


def test_passes_of_requests_that_set_their_pace_say_nothing_of_its_ways() -> None:
    ways = ways_of(DECODE, "balanced")
    pacer, slots = Pacer(ways, COSTS), np.arange(2)
    before = pacer.tokens_per_s(2)
    for slot in range(2):
        pacer.admit(slot, is_paced=False)
    for _ in range(40):
        assert pacer.turn(slots) == []
        pacer.note(slots, np.full(2, 100.0))
        pacer.took(1.0)
    assert all(now > 0.7 * own for now, own in zip(pacer.tokens_per_s(2), before, strict=True)), "prompts are learnt"
    pacer.admit(2, is_paced=True)
    for _ in range(40):
        pacer.turn(np.arange(3))
        pacer.note(np.arange(3), np.full(3, 100.0))
        pacer.took(1.0)
    assert max(pacer.tokens_per_s(2)) < 0.1 * max(before)


def test_without_a_pace_nothing_is_chosen() -> None:
    assert paced(DECODE, "fixed") is DECODE
    done = decoded("fixed", [request("one")])
    assert done["one"].ways == ()


@pytest.mark.parametrize(
    "own",
    [
        {"stop": ["end"], "stop_token_ids": [1]},
        {"strategy": "block_diffusion", "window_attention": "block_causal", "block_size": 4, "max_new_tokens": 16},
        {"max_steps": 1},
    ],
)
def test_the_host_is_timed_whatever_ends_a_request(own: dict[str, object]) -> None:
    of_one, of_more = host_seconds(DecodeConfig.model_validate({"num_lookahead": 3, **own}), 2)
    assert of_one > 0 and of_more >= 0
    assert host_seconds(DecodeConfig.model_validate({"num_lookahead": 3, **own}), 1)[1] == 0
