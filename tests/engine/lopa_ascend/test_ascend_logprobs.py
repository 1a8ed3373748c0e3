"""Log probabilities of the Ascend engine in its ref lane: those of its own passes, and the plain CUDA engine's."""

from __future__ import annotations

import pytest

from common.config import DeviceProfile
from tests.distributed.logprobs_worker import likelihoods
from tests.telling import Decoded, Recomputing


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
