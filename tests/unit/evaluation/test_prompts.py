"""A prompt of the user's own is no row of the run's benchmark."""

from __future__ import annotations

from scripted import ScriptedGenerator

from common.config import DeviceProfile, InputConfig, RunConfig
from common.evaluation import request_of


def test_a_traced_prompt_is_asked_as_it_is(cpu: DeviceProfile) -> None:
    run = RunConfig(model="m", input=InputConfig(path="x", benchmark="math"))
    generator = ScriptedGenerator(cpu, run)
    assert generator.tokenizer.decode(list(request_of(generator, {"question": "why?"}).prompt)) == "<why?>"  # type: ignore[arg-type]
