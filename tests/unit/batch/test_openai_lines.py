"""OpenAI's batch files: lines in, lines out, by the rules of the server's routes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import execute, output_path, records, write_input
from openai.types import Completion
from openai.types.chat import ChatCompletion
from scripted import ScriptedGenerator, ScriptedTokenizer

from common.batch import require_some_finished, run_batch
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError, EngineError
from common.serving import openai_records


def asked(custom_id: str, url: str = "/v1/completions", method: str = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"max_tokens": 8} | body}


def answer(profile: DeviceProfile, run: RunConfig, **options: bool) -> dict[str, dict[str, Any]]:
    """Run the file, and return its output lines by custom_id."""
    run_batch(profile, run, lambda: ScriptedGenerator(profile, run), openai=openai_records, **options)
    return {line["custom_id"]: line for line in records(run)}


def test_answers_are_what_openais_client_reads_and_are_counted_as_any(cpu: DeviceProfile, run: RunConfig) -> None:
    chat = asked("c", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    write_input(run, [asked("a", prompt="hi", model="m"), asked("b", prompt=["one", "two"], echo=True), chat])
    lines = answer(cpu, run)
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in lines.values())
    assert all(line["id"].startswith("batch_req_") for line in lines.values())
    single, several = (Completion.model_validate(lines[name]["response"]["body"]) for name in "ab")
    assert single.model == "m" and single.usage is not None and single.usage.completion_tokens <= 8
    assert [choice.index for choice in several.choices] == [0, 1] and several.choices[1].text.startswith("two")
    told = ChatCompletion.model_validate(lines["c"]["response"]["body"])
    assert told.choices[0].message.content is not None and told.id == "chatcmpl-c"
    metrics = json.loads(output_path(run).with_name("o.metrics.json").read_text())
    assert metrics["requests"]["finished"] == 3 and metrics["tokens"]["effective"] > 0


def test_a_line_that_is_refused_is_a_line_with_the_servers_sentence(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(
        run,
        [
            asked("fine", prompt="hi"),
            asked("url", "/v1/embeddings", input="x"),
            asked("method", method="GET", prompt="x"),
            asked("model", prompt="x", model="gpt-4"),
            asked("stream", prompt="x", stream=True),
            asked("field", prompt="x", temperature="hot"),
            asked("tools", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], tools=[{}]),
            asked("nothing", max_tokens=3),
            {"custom_id": "body", "url": "/v1/completions", "body": "x"},
            {"custom_id": "none", "url": "/v1/completions"},
            {"custom_id": "nowhere", "body": {"prompt": "x"}},
            "no json",
            {"prompt": "a line of ours"},
        ],
    )
    lines = answer(cpu, run)
    told = {
        name: (line["response"]["status_code"], line["response"]["body"].get("error", {"message": ""})["message"])
        for name, line in lines.items()
        if line["response"] is not None
    }
    for name, status, words in (
        ("url", 404, "'/v1/embeddings' is not answered from a file: write /v1/chat/completions or /v1/completions"),
        ("method", 405, "'GET', and routes take POST"),
        ("model", 404, "the model 'gpt-4' is not served here, only m"),
        ("stream", 400, "stream: a line has the whole answer"),
        ("field", 400, "temperature: set it to a number"),
        ("tools", 400, "tools.0: "),
        ("nothing", 400, "prompt: "),
        ("body", 400, "body: write a JSON object, the fields of the request"),
        ("none", 400, "body: write a JSON object, the fields of the request"),
        ("nowhere", 404, "url: None is not answered from a file"),
    ):
        assert told.pop(name)[0] == status and words in lines[name]["response"]["body"]["error"]["message"]
    assert set(lines) - set(told) >= {"line-12"} and "not valid JSON" in lines["line-12"]["error"]["message"]
    assert "write custom_id, url and body" in lines[13]["error"]["message"]
    assert set(told) == {"fine"} and told["fine"] == (200, "")


def test_chats_that_cannot_be_rendered_on_this_machine_end_the_run(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = asked("c", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    write_input(run, [asked("a", prompt="hi"), chat])
    error = EngineError("chat templates cannot be rendered (exit code 1): install transformers and jinja2 anew")
    fails: Callable[..., Any] = lambda *_: (_ for _ in ()).throw(error)  # noqa: E731
    monkeypatch.setattr(ScriptedTokenizer, "chat_text", fails)
    with pytest.raises(EngineError, match="cannot be rendered"):
        answer(cpu, run)
    assert [record["custom_id"] for record in records(run)] == ["a"]


def test_a_line_that_is_no_request_costs_a_run_with_a_template_nothing(cpu: DeviceProfile, run: RunConfig) -> None:
    assert run.input is not None
    source = run.input.model_copy(update={"prompt_template": "{question}"})
    write_input(run, [asked("fine", prompt="hi"), {"foo": 1}, {"url": "/v1/completions", "body": {"prompt": "x"}}])
    lines = answer(cpu, run.model_copy(update={"input": source}))
    assert len(lines) == 3 and lines["fine"]["error"] is None
    told = [line["error"]["message"] for name, line in lines.items() if name != "fine"]
    assert all("write custom_id, url and body" in sentence for sentence in told)


def test_an_object_with_a_key_twice_is_no_line(cpu: DeviceProfile, run: RunConfig) -> None:
    assert run.input is not None
    line = json.dumps(asked("fine", prompt="hi"))
    write_input(run, [asked("other", prompt="hi")])
    with Path(run.input.path).open("a") as stream:
        stream.write(line[:-1] + ', "custom_id": "again"}\n')
    lines = answer(cpu, run)
    assert lines["other"]["error"] is None
    (told,) = (line["error"]["message"] for name, line in lines.items() if name != "other")
    assert "an object has the key 'custom_id' twice" in told


def test_a_run_is_resumed_by_custom_id_and_errors_are_tried_again(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [asked("a", prompt="hi"), asked("b", prompt="ho"), asked("c", prompt="x", temperature="hot")])
    first = answer(cpu, run)
    kept = [line for line in output_path(run).read_text().splitlines(True) if '"custom_id": "a"' in line]
    output_path(run).write_text("".join(kept))
    second = answer(cpu, run)
    assert second["a"] == first["a"], "it was not decoded again"
    for name in "bc":
        assert second[name]["response"]["status_code"] == first[name]["response"]["status_code"]
    assert answer(cpu, run, retry_errors=True).keys() == first.keys() and len(records(run)) == 3


def test_drawn_answers_do_not_depend_on_when_a_line_is_decoded(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [asked("a", prompt="hi", temperature=1.0, n=2), asked("b", prompt="hi", temperature=1.0)])
    first = answer(cpu, run)
    second = answer(cpu, run, overwrite=True)
    for name, line in first.items():
        assert line["response"]["body"]["choices"] == second[name]["response"]["body"]["choices"]
    assert len(first["a"]["response"]["body"]["choices"]) == 2


def test_two_lines_with_one_custom_id_are_refused(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [asked("a", prompt="hi"), asked("a", prompt="ho")])
    with pytest.raises(ConfigError, match="lines 1 and 2 have the same id 'a'"):
        answer(cpu, run)


def test_a_file_without_an_answer_ends_in_a_sentence(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [asked("a", prompt="x", model="gpt-4")])
    metrics = run_batch(cpu, run, lambda: ScriptedGenerator(cpu, run), openai=openai_records)
    assert metrics is not None
    with pytest.raises(
        ConfigError, match=r"none of 1 requests could be decoded. a: the model 'gpt-4' is not served here"
    ):
        require_some_finished(run, metrics)


def test_other_commands_say_who_answers_such_a_file(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [asked("a", prompt="hi")])
    execute(cpu, run)
    assert records(run) == [
        {"id": "a", "error": "line 1: it is of an OpenAI batch file, which `lopa run` answers, without --ray"}
    ]
