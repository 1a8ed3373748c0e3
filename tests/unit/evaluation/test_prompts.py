"""A prompt of the user's own is no row of the run's benchmark."""

from __future__ import annotations

from scripted import ScriptedGenerator

from common.config import DeviceProfile, InputConfig, RunConfig
from common.evaluation.record import _request


def test_a_traced_prompt_is_asked_as_it_is(cpu: DeviceProfile) -> None:
    run = RunConfig(model="m", input=InputConfig(path="x", benchmark="math"))
    generator = ScriptedGenerator(cpu, run)
    assert generator.tokenizer.decode(list(_request(generator, "why?").prompt)) == "<why?>"  # type: ignore[arg-type]
