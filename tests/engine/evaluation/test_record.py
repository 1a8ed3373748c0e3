"""`lopa trace` on the shipped model: what is told of the passes is what was decoded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from started import lopa
from typer.testing import CliRunner

from common.commands.main import app
from common.config import DecodeConfig, DeviceProfile, InputConfig, RunConfig
from common.decoding import Completion, GenerationRequest
from common.errors import ConfigError
from common.evaluation import record_trace
from common.generate import Generator, build_generator

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "demo"
QUESTION = "Tom has 12 apples and buys 5 more. How many apples does he have now?"

pytestmark = pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="models/demo holds no checkpoint")


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=320)
    decode = DecodeConfig(num_lookahead=3, block_size=16, max_new_tokens=64, skip_threshold=0.95)
    source = InputConfig(path="unread.jsonl", prompt_template="{question}\n")
    with build_generator(profile, RunConfig(model=str(MODEL), decode=decode, input=source)) as built:
        yield built


@pytest.fixture(scope="module")
def trace(generator: Generator) -> dict[str, Any]:
    found = record_trace(generator, QUESTION)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def completion(generator: Generator) -> Completion:
    prompt = tuple(generator.tokenizer.encode(f"{QUESTION}\n"))
    (found,) = generator.generate([GenerationRequest("trace", prompt)])
    assert isinstance(found, Completion)
    return found


def test_the_answer_is_that_of_a_run(trace: dict[str, Any], completion: Completion, generator: Generator) -> None:
    assert trace["answer"]["length"] == len(completion.token_ids)
    assert trace["answer"]["text"] == generator.tokenizer.decode(completion.token_ids)
    assert "17" in trace["answer"]["text"]
    assert trace["num_lookahead_wins"] == completion.num_lookahead_wins


def test_the_passes_fill_the_canvas(trace: dict[str, Any], completion: Completion) -> None:
    events = trace["events"]
    filled = {position: token for event in events for position, token, _, _ in event["filled"]}
    canvas = [filled.get(position) for position in range(completion.prompt_length, max(filled) + 1)]
    assert canvas[: len(completion.token_ids)] == list(completion.token_ids)
    assert [event["pass"] for event in events] == list(range(1, completion.num_forwards + 1))
    assert [event["finished"] for event in events] == [None] * (len(events) - 1) + [completion.finish_reason]
    assert len(trace["seconds"]) == len(events)
    assert trace["seconds"] == sorted(trace["seconds"]) and trace["seconds"][0] > 0


def test_every_token_has_its_text(trace: dict[str, Any], generator: Generator) -> None:
    told = {token: text for event in trace["events"] for _, token, text, _ in event["filled"]}
    told |= {token: text for event in trace["events"] for fills, _ in event["lookahead"] for _, token, text in fills}
    assert any(event["lookahead"] for event in trace["events"])
    assert told == {token: generator.tokenizer.decode([token], skip_special_tokens=False) for token in told}


def test_usual_settings_are_told_and_whatever_is_unusual(generator: Generator) -> None:
    decode = generator.run.decode.model_copy(update={"temperature": 0.5, "max_new_tokens": 32})
    found = record_trace(generator.with_decode(decode), QUESTION)
    assert found is not None
    assert found["settings"]["block_add_threshold"] == 0.1  # as usual, and always told
    assert found["settings"]["temperature"] == 0.5
    assert "top_p" not in found["settings"]


def test_the_settings_of_a_shortened_answer_are_told(generator: Generator) -> None:
    found = record_trace(generator, "a " * 290)
    assert found is not None and found["settings"]["max_new_tokens"] == 16 < generator.run.decode.max_new_tokens


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_refused(generator: Generator, prompt: str) -> None:
    with pytest.raises(ConfigError, match="PROMPT is empty: give the text to answer"):
        record_trace(generator, prompt)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("a " * 600, "PROMPT: .*the model's context of 320 tokens: shorten the prompt"), ("\ud800", "PROMPT: .*valid")],
)
def test_a_prompt_that_cannot_be_decoded_is_one_sentence(generator: Generator, prompt: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        record_trace(generator, prompt)
    assert record_trace(generator, QUESTION) is not None, "the engine is free for the next"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--html", "."], "lopa: --html . is a folder: name a file in it\n"),
        (["--html", "a", "--json", "./a"], "lopa: --html and --json name the same file: choose two\n"),
        (["--set", "decode.block_size=0"], "decode.block_size: set it"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done = lopa("trace", QUESTION, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_both_files_and_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the profile sets it
    done = CliRunner().invoke(
        app, ["trace", QUESTION, "--html", "out/a.html", "--json", "out/a.json", "--set", f"model={MODEL}"]
    )
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.html", "a.json"]
    trace = json.loads((tmp_path / "out" / "a.json").read_text(encoding="utf-8"))
    assert done.stdout == trace["answer"]["text"].strip("\n") + "\n"
    assert f"{trace['answer']['length']} tokens in {len(trace['events'])} forward passes" in done.stderr
    assert "written: out/a.html" in done.stderr
    page = (tmp_path / "out" / "a.html").read_text(encoding="utf-8")
    assert json.dumps(trace["events"], separators=(",", ":"))[:200] in page
