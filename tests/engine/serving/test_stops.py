"""An answer ends at the same place through every door: streamed or whole, over HTTP, in a batch run, from Python and
for lm-eval, whatever ends it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from common.batch import run_batch
from common.config import InputConfig, OutputConfig, RunConfig, find_config, load_profile, load_run
from common.evaluation.harness_model import HarnessModel
from common.generate import Generator, build_generator
from tests.engine.serving.served import QUESTION, ROOT, Served, events_of

pytestmark = pytest.mark.slow

END = "<|endoftext|>"
PROMPT = QUESTION.format(12) + "\n"
DECODE = {"num_lookahead": 0, "max_new_tokens": 64, "eos_token_id": 3, "stop": ["the run's own"]}


class Case(NamedTuple):
    """text: what the answer is, cut out of the texts with and without special tokens of an answer that nothing ends."""

    settings: dict[str, Any]
    text: Any
    stop_reason: str | int | None


CASES = [
    Case({}, lambda shown, all: shown, None),
    Case({"stop": [END]}, lambda shown, all: all.partition(END)[0], END),
    Case({"stop": [END, "of that"], "skip_special_tokens": False}, lambda shown, all: all.partition(END)[0], END),
    Case({"stop": ["endoftext"], "skip_special_tokens": False}, lambda _, all: all.partition("endof")[0], "endoftext"),
    Case({"stop": ["endoftext"]}, lambda shown, all: shown, None),
    Case({"stop": ["Step 1: 5", "ep"]}, lambda shown, all: "", "Step 1: 5"),
    Case({"stop": ["17", "=17 apples"]}, lambda shown, all: shown.partition("=17 apples")[0], "=17 apples"),
    Case({"stop": [" come"]}, lambda shown, all: shown.partition(" come")[0], " come"),
    Case({"stop": ["nothing of that", "come", "zz"]}, lambda shown, all: shown.partition("come")[0], "come"),
    Case({"stop_token_ids": [1022]}, lambda shown, all: all.partition(END)[0], 1022),
    Case({"stop_token_ids": [1022], "skip_special_tokens": False}, lambda shown, all: all.partition(END)[0], 1022),
    Case({"stop_token_ids": [1022], "stop": ["17"]}, lambda shown, all: shown.partition("17")[0], "17"),
]


@pytest.fixture(scope="module")
def run() -> RunConfig:
    made = load_run(find_config("runs", "demo"), [f"model={ROOT / 'models' / 'demo'}"])
    return made.model_copy(update={"decode": made.decode.changed(DECODE)})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = [f"decode.{name}={json.dumps(value)}" for name, value in DECODE.items()]
    settings = [item for option in options for item in ("--set", option)]
    with Served(tmp_path_factory.mktemp("served") / "log", *settings) as server:
        yield server


@pytest.fixture(scope="module")
def generator(run: RunConfig) -> Iterator[Generator]:
    with build_generator(load_profile(find_config("profiles", "cpu")), run) as made:
        yield made


@pytest.fixture(scope="module")
def texts(generator: Generator) -> tuple[str, str]:
    """The text of an answer that nothing ends: without special tokens and with them."""
    shown, all = (generator.with_decode(changed(generator, skip)).complete(PROMPT)[0] for skip in (True, False))
    assert END in all and END not in shown
    return shown, all


def changed(generator: Generator, skip_special_tokens: bool) -> Any:
    return generator.run.decode.changed({"skip_special_tokens": skip_special_tokens})


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case.settings))
def test_over_http(served: Served, texts: tuple[str, str], case: Case) -> None:
    body = {"prompt": PROMPT, "max_tokens": 64, **case.settings}
    for route in ("/v1/completions", "/generate"):
        status, whole = served.post(route, body)
        assert status == 200, whole
        answer = whole["choices"][0] if route != "/generate" else whole
        assert (answer["text"], answer["stop_reason"]) == (case.text(*texts), case.stop_reason)
        assert answer["finish_reason"] == ("length" if case.stop_reason is None else "stop")
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = events_of(served.send("POST", route, json.dumps(streamed).encode())[1])[:-1]
        if route == "/generate":
            assert answer["text"].startswith("".join(event["text"] for event in events[:-1]))
            assert {**events[-1], "id": ""} == {**whole, "id": ""}
            continue
        parts = [choice for event in events for choice in event["choices"]]
        assert "".join(part["text"] for part in parts) == answer["text"]
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (answer["finish_reason"], case.stop_reason)
        assert events[-1]["usage"] == whole["usage"]


def test_stats_come_in_a_stream_without_usage_too(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "stream": True, "diffusion": {"stats": True}}
    events = events_of(served.send("POST", "/v1/completions", json.dumps(body).encode())[1])[:-1]
    assert events[-1]["diffusion"]["forwards"] > 0 and "usage" not in events[-1]
    assert all("diffusion" not in event for event in events[:-1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case.settings))
def test_from_python_and_for_lm_eval(generator: Generator, texts: tuple[str, str], case: Case) -> None:
    own = generator.with_decode(generator.run.decode.changed(case.settings))
    assert own.complete(PROMPT) == [case.text(*texts)]
    asked = {name: value for name, value in case.settings.items() if name != "stop"}
    request = SimpleNamespace(args=(PROMPT, {"until": case.settings.get("stop", []), **asked}))
    assert HarnessModel(generator).generate_until([request], disable_tqdm=True) == [case.text(*texts)]


def test_in_a_batch_run(tmp_path: Path, run: RunConfig, generator: Generator, texts: tuple[str, str]) -> None:
    lines = [{"id": place, "prompt": PROMPT, "decode": case.settings} for place, case in enumerate(CASES)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = InputConfig(path=str(tmp_path / "in.jsonl"), settings_field="decode")
    own = run.model_copy(update={"input": source, "output": OutputConfig(path=str(tmp_path / "out.jsonl"))})
    run_batch(generator.profile, own, lambda: generator)
    records = {record["id"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    for place, case in enumerate(CASES):
        reason = "length" if case.stop_reason is None else "stop"
        assert (records[place]["text"], records[place]["finish_reason"]) == (case.text(*texts), reason), case.settings


def test_a_stop_token_ends_an_answer_as_an_end_token_does(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 64, "return_token_ids": True}
    by_stop = served.post("/v1/completions", {**body, "stop_token_ids": [1022]})[1]
    by_end = served.post("/generate", {**body, "stop_token_ids": [1022], "include_stop_str_in_output": True})[1]
    assert by_stop["choices"][0]["token_ids"] == by_end["token_ids"] and by_end["token_ids"][-1] == 1022
    shown = {**body, "stop_token_ids": [1022], "include_stop_str_in_output": True, "skip_special_tokens": False}
    assert served.post("/generate", shown)[1]["text"] == by_stop["choices"][0]["text"] + END


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [([99999], "99999 is no token of this model"), ([1023], "1023 is the mask token"), ([0] * 129, "at most 128")],
)
def test_stop_tokens_are_tokens(served: Served, ids: list[int], sentence: str) -> None:
    status, answer = served.post("/generate", {"prompt": PROMPT, "stop_token_ids": ids})
    assert status == 400 and sentence in answer["error"]["message"]
    assert answer["error"]["param"] == "stop_token_ids"
