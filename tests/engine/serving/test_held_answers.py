"""Answers held to formats, over HTTP, by the openai client and in batch files, with the demo model on a CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel
from started import lopa

from tests.engine.serving.served import QUESTION, WAIT_S, Served

pytestmark = pytest.mark.slow

pytest.importorskip("outlines_core", reason="needs the extra structured")

ASKED: dict[str, Any] = {
    "model": "demo", "messages": [{"role": "user", "content": QUESTION.format(12)}], "max_tokens": 48,
}  # fmt: skip
NESTED = "((a{1,50}){1,50}){1,50}"  # 125,000 letters, of which each is a state


class Apples(BaseModel):
    kind: Literal["red", "green"]
    count: int
    is_sure: bool


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = ("max_num_requests=4", "decode.num_lookahead=3")
    options = [item for option in settings for item in ("--set", option)]
    with Served(tmp_path_factory.mktemp("served") / "log", *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def text_of(client: OpenAI, **more: Any) -> str:
    (choice,) = client.chat.completions.create(**ASKED, **more).choices
    assert choice.message.content is not None
    return choice.message.content


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_pydantic_model_is_parsed_whole_and_streamed(client: OpenAI, temperature: float) -> None:
    more: dict[str, Any] = {"response_format": Apples, "temperature": temperature, "seed": 7}
    (choice,) = client.chat.completions.parse(**ASKED, **more).choices
    assert isinstance(choice.message.parsed, Apples)
    with client.chat.completions.stream(**ASKED, **more) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.parsed == choice.message.parsed
    assert "".join(pieces) == choice.message.content


def test_any_object_a_regular_expression_and_a_choice(client: OpenAI) -> None:
    assert isinstance(json.loads(text_of(client, response_format={"type": "json_object"})), dict)
    for outputs, pattern in (
        ({"regex": "[0-9]{2} apples"}, "[0-9]{2} apples"), ({"choice": ["yes", "not sure"]}, "yes|not sure"),
        ({"json": {"enum": [17, "many"]}}, '17|"many"'),
    ):  # fmt: skip
        assert re.fullmatch(pattern, text_of(client, extra_body={"structured_outputs": outputs}))


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "one of text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "a name and a schema"),
        ({"structured_outputs": {"json": {"minimum": 3, "type": "integer"}}}, "structured_outputs", "'minimum'"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "no regular expression"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs", "grammar is not enforced"),
        ({"structured_outputs": {"choice": [str(n) for n in range(10_000)]}}, "structured_outputs", "at most 1000"),
        ({"structured_outputs": {"choice": ["yes"]}, "max_tokens": 1}, "max_tokens", "raise it"),
        ({"structured_outputs": {"choice": ["yes"]}, "stop": "x"}, "stop", "remove it"),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(client: OpenAI, body: Any, field: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(why)) as refused:
        client.chat.completions.create(**{**ASKED, "extra_body": body})
    assert refused.value.param == field


def test_a_hostile_expression_is_refused_while_others_are_answered(client: OpenAI, served: Served) -> None:
    """One that the library would compile for minutes. The front end answers until its time is over."""
    outputs = {"structured_outputs": {"regex": NESTED}}
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(text_of, client, extra_body=outputs)
        num_answered = 0
        while not hostile.done():
            client.completions.create(model="demo", prompt="a", max_tokens=4)
            num_answered += 1
        assert num_answered > 1, "they waited for it"
        with pytest.raises(openai.BadRequestError, match=r"more than . (s|GiB) to compile"):
            hostile.result()
    served.wait_for(served.is_empty, "empty")
    assert "Traceback" not in served.text


def test_lines_of_batch_files_have_formats(tmp_path: Path) -> None:
    outputs = {"structured_outputs": {"regex": "[0-9]{2} apples"}}
    prompt = QUESTION.format(12) + "\n"
    lines = {
        "own": {"id": "own", "question": QUESTION.format(12), "decode": {**outputs, "max_tokens": 24}},
        "openai": {
            "custom_id": "openai", "method": "POST", "url": "/v1/completions",
            "body": {"prompt": prompt, "max_tokens": 24, **outputs},
        },
    }  # fmt: skip
    for name, more in (("own", ["--set", "input.settings_field=decode"]), ("openai", [])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(lines[name]) + "\n")
        files = [tmp_path / f"{name}.jsonl", "-o", tmp_path / name / "out.jsonl"]
        done = lopa("run", "--profile", "cpu", "demo", *files, *more, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        (record,) = map(json.loads, (tmp_path / name / "out.jsonl").read_text().splitlines())
        text = record["text"] if name == "own" else record["response"]["body"]["choices"][0]["text"]
        assert re.fullmatch("[0-9]{2} apples", text)


def test_choices_come_with_their_probabilities(client: OpenAI) -> None:
    asked: dict[str, Any] = {"structured_outputs": {"choice": ["17", "12", "seventeen"]}}
    told = {"extra_body": {**asked, "diffusion": {"choice_probabilities": True}}}
    prompt = f"{QUESTION.format(12)}\nStep 1: there are 12+5="
    made = client.completions.create(model="demo", prompt=prompt, max_tokens=16, **told)
    (choice,) = made.choices
    shares: dict[str, float] = choice.choice_probabilities  # type: ignore[attr-defined]
    assert list(shares) == ["17", "12", "seventeen"] and sum(shares.values()) == pytest.approx(1)
    assert max(shares, key=lambda text: shares[text]) == "17" == choice.text
    assert 0 < choice.choice_mass <= 1  # type: ignore[attr-defined]
    chunks = list(client.completions.create(model="demo", prompt=prompt, max_tokens=16, stream=True, **told))
    last = next(chunk.choices[0] for chunk in reversed(chunks) if chunk.choices)
    assert last.choice_probabilities == pytest.approx(shares)  # type: ignore[attr-defined]
    twice = {**told["extra_body"], "structured_outputs": {"choice": ["17", "17", "12", "seventeen"]}}
    (again,) = client.completions.create(model="demo", prompt=prompt, max_tokens=16, extra_body=twice).choices
    assert again.choice_probabilities == pytest.approx(shares)  # type: ignore[attr-defined]
    long = {**told["extra_body"], "structured_outputs": {"choice": ["17", "17 " * 9]}}
    with pytest.raises(openai.BadRequestError, match=r"max_tokens: a text of the choice has \d+ tokens, more than 4"):
        client.completions.create(model="demo", prompt=prompt, max_tokens=4, extra_body=long)
    with pytest.raises(openai.BadRequestError, match=r"diffusion\.choice_probabilities: only with structured_outputs"):
        client.completions.create(model="demo", prompt="a", extra_body={"diffusion": {"choice_probabilities": True}})
