"""Answers of models held to formats: valid on every strategy, alone and among others, in canvases from the shortest
on."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.constraints import Compiler, Format, made
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests
from common.platforms import build_engine
from common.requests import Wishes
from common.requests.formats import limited
from common.runtime import facts_of
from tests.distributed.strategies_worker import CASES, MASK, MODELS, REVISING
from tests.schemas import SUITE
from tests.soaking import SOAKS

CPU = DeviceProfile(name="one", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=256)
EOS = 1
HELD = [name for name in CASES if name == "llada2 edits" or name not in REVISING]  # the others move tokens
# What a tiny model's tokens are taken to write: bytes, and pieces that cross the syntax of JSON.
PIECES = ['{"', '":', '": "', '", "', "true", "}}", '"}', "12", ", ", "20", "\n  ", "[]", "null", "yes", "no", "not "]
TOKENS = {2 + byte: bytes([byte]) for byte in range(256)} | {258 + n: piece.encode() for n, piece in enumerate(PIECES)}
COMPILER = Compiler(lambda: TOKENS, 512, made)
CHOICE = Format("choice", json.dumps(["yes", "no", "not sure", "12 or 20"]))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": ["on", "off"]}, "n": {"type": "integer"}},
    "required": ["a", "n"],
}


@cache
def engine_of(name: str, num_slots: int) -> Any:
    model, own = CASES[name]
    decode = DecodeConfig.model_validate({"max_new_tokens": 48, **own, "num_lookahead": 7})
    return build_engine(CPU, RunConfig(model=str(MODELS / model), decode=decode, max_num_requests=num_slots))


def decoded(
    name: str, format: Format | None, k: int, temperature: float, more: int, num_slots: int = 4, count: int = 4
) -> list[Any]:
    """Answers of some requests, of which every other one is held to the format."""
    model, own = CASES[name]
    block, automaton = own["block_size"], None if format is None else COMPILER.automaton(format)
    most = more + (0 if automaton is None else automaton.shortest)
    settings = {
        "skip_threshold": 0.3, "sampling_strategy": "neg_entropy", **own, "max_new_tokens": -(-most // block) * block,
        "num_lookahead": k, "temperature": temperature, "eos_token_id": EOS,
    }  # fmt: skip
    decode = DecodeConfig.model_validate(settings)
    scheduler = Scheduler(
        decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=num_slots,
        facts=facts_of(load_model_config(MODELS / model)),
    )  # fmt: skip
    requests = [
        GenerationRequest(
            str(number), tuple(range(10, 21 + 7 * (number % 4))), max_tokens=most,
            decode=limited(Wishes(), decode, "a format"), automaton=None if number % 2 else automaton,
        )
        for number in range(count)
    ]  # fmt: skip
    results = {one.id: one for one in decode_requests(iter(requests), scheduler, engine_of(name, max(4, num_slots)))}
    assert not [one for one in results.values() if not isinstance(one, Completion)]
    return [results[request.id] for request in requests]


def text_of(completion: Completion) -> str:
    return b"".join(TOKENS[token] for token in completion.token_ids if token != EOS).decode()


def test_many_are_solved_on_several_threads_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    own, started = (HELD[0], CHOICE, 3, 0.8, 9), []
    submit = ThreadPoolExecutor.submit
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *given: started.append(given) or submit(*given))
    alone = decoded(*own, num_slots=1, count=20)
    assert not started
    together = decoded(*own, num_slots=20, count=20)
    assert started
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize(("k", "temperature", "more"), [(0, 0.0, 0), (3, 0.0, 9), (7, 0.8, 20)])
def test_an_answer_is_one_of_the_texts(name: str, k: int, temperature: float, more: int) -> None:
    for completion in decoded(name, CHOICE, k, temperature, more)[::2]:
        assert text_of(completion) in json.loads(CHOICE.text) and completion.finish_reason == "eos"


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize(("k", "temperature", "more"), [(0, 0.8, 0), (7, 0.0, 12)])
def test_an_answer_is_valid(name: str, k: int, temperature: float, more: int) -> None:
    pytest.importorskip("outlines_core")
    jsonschema = pytest.importorskip("jsonschema")
    for completion in decoded(name, Format("json", json.dumps(SCHEMA)), k, temperature, more)[::2]:
        jsonschema.validate(json.loads(text_of(completion)), SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_answers_of_published_cases_are_valid(name: str) -> None:
    pytest.importorskip("outlines_core")
    jsonschema, draws = pytest.importorskip("jsonschema"), random.Random(name)
    for case in draws.sample(sorted(SUITE), len(SUITE) if SOAKS else 6):
        format = Format("json", json.dumps(SUITE[case].schema))
        k, temperature, more = draws.choice([0, 3, 7]), draws.choice([0.0, 0.8]), draws.choice([0, 1, 7, 20])
        for completion in decoded(name, format, k, temperature, more, count=2)[::2]:
            value = json.loads(text_of(completion))
            jsonschema.validate(value, SUITE[case].schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", HELD)
def test_answers_are_the_same_alone_and_beside_others(name: str) -> None:
    together, alone = (decoded(name, CHOICE, 3, 0.8, 9, num_slots) for num_slots in (4, 1))
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    plain = decoded(name, None, 3, 0.8, 9 + COMPILER.automaton(CHOICE).shortest)
    assert [one.token_ids for one in together[1::2]] == [one.token_ids for one in plain[1::2]]


@pytest.mark.parametrize("name", HELD)
def test_a_format_of_every_text_changes_nothing(name: str) -> None:
    """An automaton of one state that every token leads back to: the answers of no format, to their first end."""
    anything = COMPILER.automaton(CHOICE)
    class_V = np.ones(512, np.int32)
    class_V[MASK] = 0
    next_QC = np.array([[-1, 0]], np.int32)
    anything = type(anything)(class_V, next_QC, np.ones(1, np.bool_), 0, "anything")
    plain = decoded(name, None, 3, 0.0, 20)
    COMPILER._kept.keep(Format("regex", "anything").digest, anything, anything.num_bytes)
    held = decoded(name, Format("regex", "anything"), 3, 0.0, 20)
    assert [one.token_ids for one in held] == [one.token_ids for one in plain]
