"""Log probabilities of tokens: those of the pass that predicted each, on both engines, and no text changes."""

from __future__ import annotations

from math import exp

import pytest

from common.config import DeviceProfile
from tests.distributed.logprobs_worker import likelihoods
from tests.telling import FAMILIES, Decoded, Recomputing, probability_and_pass

SLOW = pytest.mark.slow
SOME = [(3, 0.8), *(pytest.param(k, t, marks=SLOW) for k in (0, 3, 7) for t in (0.0, 0.8) if (k, t) != (3, 0.8))]


@pytest.mark.parametrize(("k", "temperature"), SOME)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_is_that_of_the_pass_that_predicted_the_token(
    cpu: DeviceProfile, name: str, k: int, temperature: float
) -> None:
    plain = Decoded(cpu, name, k, temperature, num_logprobs=None)
    asked = Decoded(cpu, name, k, temperature, engine=Recomputing(plain.engine))
    watched = Decoded(cpu, name, k, temperature, is_watched=True, engine=plain.engine)
    assert asked.tokens == plain.tokens == watched.tokens, "no token depends on who asks"
    assert asked.engine.num_asked > 0 and asked.engine.furthest < 1e-4
    for id, done in asked.completions.items():
        assert len(done.logprobs) == len(done.step_map) == len(done.token_ids)
        assert plain.completions[id].logprobs == () and plain.completions[id].step_map == done.step_map
        by_hand = watched.completions[id]
        assert [one.logprob for one in by_hand.logprobs] == pytest.approx([one.logprob for one in done.logprobs])
        recorded = probability_and_pass(done, watched.records[id])
        if name == "dream stale":
            steps = [
                (done.step_map[place], step) for place, (_, step, is_of_pass) in recorded.items() if not is_of_pass
            ]
            assert any(own < step for own, step in steps), "what is carried over a commit is an earlier pass's"
        assert len(recorded) >= 0.9 * len(done.token_ids)
        for place, (probability, step, is_of_pass) in recorded.items():
            if place < len(done.token_ids):
                assert exp(done.logprobs[place].logprob) == pytest.approx(probability, rel=1e-4, abs=1e-6)
                assert done.step_map[place] == step if is_of_pass else done.step_map[place] <= step
        assert all(len(one.top) == 2 and one.top[0][1] >= one.top[1][1] for one in done.logprobs)
        if not temperature:
            assert [one.top[0][0] for one in done.logprobs] == list(done.token_ids)


def test_a_token_that_moves_takes_its_own_along(cpu: DeviceProfile) -> None:
    """One that were lost on the way would be missing from what the engine has told, by origin."""
    plain = Decoded(cpu, "llada2_2 moves", 0, 0.0, num_logprobs=None)
    asked = Decoded(cpu, "llada2_2 moves", 0, 0.0, engine=Recomputing(plain.engine))
    assert asked.tokens == plain.tokens and asked.engine.num_asked > 0 and asked.engine.furthest < 1e-4
    for done in asked.completions.values():
        assert len(done.logprobs) == len(done.step_map) == len(done.token_ids)
        assert 1 <= min(done.step_map) < max(done.step_map) <= done.num_forwards


def test_who_does_not_ask_has_no_head_twice(cpu: DeviceProfile) -> None:
    engine = Recomputing(Decoded(cpu, "sdar fused", 0, 0.0, num_logprobs=None).engine)
    Decoded(cpu, "sdar fused", 3, 0.8, num_logprobs=None, engine=engine)
    assert engine.num_asked == 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("name", ["dream fresh", "llada d2f", "sdar fused", "llada2 edits"])
def test_they_are_those_of_the_cuda_engine(cpu: DeviceProfile, name: str, k: int, temperature: float) -> None:
    ascend = cpu.model_copy(update={"engine": "lopa_ascend"})
    silent = Decoded(ascend, name, k, temperature, num_logprobs=None)
    found = Decoded(ascend, name, k, temperature, engine=Recomputing(silent.engine))
    wanted = Decoded(cpu, name, k, temperature)
    assert found.tokens == silent.tokens == wanted.tokens
    assert found.engine.num_asked > 0 and found.engine.furthest < 1e-4
    for id, done in found.completions.items():
        own, others = ([one.logprob for one in each.logprobs] for each in (done, wanted.completions[id]))
        assert own == pytest.approx(others, abs=1e-4) and done.step_map == wanted.completions[id].step_map


@pytest.mark.parametrize("name", ["llada d2f", "sdar fused"])
def test_likelihoods_are_those_of_the_cuda_engine(cpu: DeviceProfile, name: str) -> None:
    ascend = cpu.model_copy(update={"engine": "lopa_ascend"})
    found, wanted = (Decoded(profile, name, 0, 0.0, num_logprobs=None).engine for profile in (ascend, cpu))
    assert likelihoods(found, name) == pytest.approx(likelihoods(wanted, name), abs=1e-3)
