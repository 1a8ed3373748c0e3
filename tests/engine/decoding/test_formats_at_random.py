"""Random requests with formats to the shipped models: every answer is valid, whatever it is decoded by."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from common.config import load_profile, load_run
from common.decoding import Completion
from common.generate import build_generator
from common.requests import Wishes
from scripts.lab.structured import FORMATS
from tests.schemas import SUITE
from tests.soaking import SOAKS

pytest.importorskip("outlines_core", reason="needs the extra structured")
jsonschema = pytest.importorskip("jsonschema")

COUNT = 200 if SOAKS else 12
LOOSEST = 60  # tokens that a canvas has more than the shortest answer
SETTINGS = {
    "d2f": ("demo", []),
    "multi_block": ("demo", ["decode.strategy=multi_block", "decode.fill_rule=entropy"]),
    "fast_dllm": ("demo", ["decode.strategy=fast_dllm"]),
    "vanilla": ("demo", ["decode.strategy=vanilla"]),
    "block_diffusion": ("demo_block", []),
    "distilled": ("demo_block_distilled", []),
}
WORDS = ["Tom has 12 apples.", "weather in Oslo?", '{"city":', "Step 1:", "def f(x):", "é", "\n"]


def asked(draws: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a format's name and what a request says of it, but for its length."""
    name = draws.choice(draws.choice([[name for name in FORMATS if name != "any object"], sorted(SUITE)]))
    kind, value = format_of(name)
    wishes = {
        "structured_outputs": {kind: value}, "num_lookahead": draws.choice([0, 3, 7]),
        "temperature": draws.choice([0.0, 0.8]),
    }  # fmt: skip
    return name, wishes


def format_of(name: str) -> tuple[str, Any]:
    return FORMATS[name] if name in FORMATS else ("json", SUITE[name].schema)


def require_valid(name: str, text: str) -> None:
    kind, value = format_of(name)
    if kind == "choice":
        assert text in value
    else:
        draft = jsonschema.Draft202012Validator
        jsonschema.validate(json.loads(text), value, cls=draft, format_checker=draft.FORMAT_CHECKER)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SETTINGS)
def test_every_answer_is_valid(strategy: str) -> None:
    run, settings = SETTINGS[strategy]
    draws = random.Random(strategy)
    options = ["decode.num_lookahead=7", "max_num_requests=4", *settings]
    names, requests = [], []
    with build_generator(load_profile("cpu"), load_run(run, options)) as generator:
        make = generator.requests
        for number in range(COUNT):
            name, wishes = asked(draws)
            shortest = make.formats.compiled(Wishes.read(wishes)).shortest
            wishes["max_tokens"] = shortest + min(draws.choice([0, 1, 7, LOOSEST]), make.base.max_new_tokens - shortest)
            prompt = make.prompts.of(" ".join(draws.choices(WORDS, k=draws.randint(1, 6))))
            names.append(name)
            requests.append(make.request(str(number), prompt, Wishes.read(wishes)))
        found = {one.id: one for one in generator.generate(requests)}
        for name, request in zip(names, requests, strict=True):
            completion = found[request.id]
            assert isinstance(completion, Completion) and completion.finish_reason in ("eos", "length")
            require_valid(name, generator.tokenizer.decode(completion.token_ids))
