"""Infilling over HTTP, by the openai client and in batch files, with the demo model on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from started import lopa

from tests.engine.serving.served import QUESTION, WAIT_S, Served

pytestmark = pytest.mark.slow

PROMPT = f"{QUESTION.format(12)}\n"
STRATEGY = ("decode.strategy=fast_dllm", "decode.num_lookahead=3")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = [item for option in ("max_num_requests=4", *STRATEGY) for item in ("--set", option)]
    with Served(tmp_path_factory.mktemp("served") / "log", *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def completed(client: OpenAI, **more: Any) -> Any:
    return client.completions.create(model="demo", prompt=PROMPT, **more)


def test_a_suffix_is_seen_and_not_repeated(client: OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 10, "suffix": "\n#### 17", "extra_body": {"return_token_ids": True}}
    made = completed(client, **asked)
    (choice,) = made.choices
    assert made.usage.completion_tokens == len(choice.token_ids) == 10 and choice.finish_reason == "stop"
    assert "####" not in choice.text
    streamed = list(completed(client, **asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == choice.text


def test_a_canvas_is_the_answer_with_its_holes_filled(client: OpenAI) -> None:
    canvas = ["12 + 5 = ", {"mask": 2}, "\n#### ", {"mask": 2}]
    asked: dict[str, Any] = {"extra_body": {"diffusion": {"canvas": canvas, "stats": True}}}
    made = completed(client, **asked)
    text = made.choices[0].text
    assert text.startswith("12 + 5 = ") and "\n#### " in text
    assert made.usage.completion_tokens == 4 and made.diffusion["forwards"] >= 1
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(completed(client, **asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4


@pytest.mark.parametrize(
    ("more", "param", "sentence"),
    [
        ({"suffix": "a", "stop": ["b"]}, "stop", "says where it ends"),
        ({"suffix": "a " * 600}, "suffix", "context of 512 tokens: shorten the prompt, or shorten the suffix"),
        ({"extra_body": {"diffusion": {"canvas": ["a"]}}}, "diffusion.canvas", "has no hole"),
        ({"extra_body": {"diffusion": {"canvas": [{"mask": "8"}]}}}, "diffusion.canvas.0", "write a text, or"),
        ({"extra_body": {"diffusion": {"canvas": [{"mask": 1}]}}, "max_tokens": 3}, "max_tokens", "remove one"),
        ({"extra_body": {"diffusion": {"canvas": ["a", {"mask": 1}]}}, "logprobs": 1}, None, "were not predicted"),
    ],
)
def test_what_is_no_canvas_is_refused(client: OpenAI, more: dict[str, Any], param: str | None, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        completed(client, **more)
    assert refused.value.param == param


def test_the_passes_tell_what_was_given_and_fill_the_rest(served: Served) -> None:
    canvas = ["12 + 5 = ", {"mask": 2}, "\n#### ", {"mask": 2}]
    body = {"prompt": PROMPT, "diffusion": {"canvas": canvas}, "stream": True, "stream_mode": "denoise"}
    status, text = served.send("POST", "/generate", json.dumps(body).encode())
    assert status == 200
    *passes, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    given = {position: token for position, token, _ in passes[0]["given"]}
    filled = {position: token for event in passes for position, token, _, _ in event["filled"]}
    assert not any("given" in event for event in passes[1:]) and len(filled) == 4 and not given.keys() & filled
    tokens = given | filled
    assert [tokens[at] for at in sorted(tokens)] == last["token_ids"] and last["usage"]["completion_tokens"] == 4
    assert passes[-1]["final_length"] == len(tokens)


def test_a_chat_has_no_suffix(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="send a prompt to /v1/completions"):
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "a"}], extra_body={"suffix": "b"}
        )


def test_batch_lines_have_canvases_too(client: OpenAI, tmp_path: Path) -> None:
    own = ({"suffix": "\n#### 17", "max_tokens": 10}, {"canvas": ["a"]})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": PROMPT, "decode": one}) + "\n" for one in own))
    settings = (
        f"input.path={tmp_path}/in.jsonl", "input.prompt_template=null", "input.limit=null",
        "input.settings_field=decode", f"output.path={tmp_path}/out.jsonl",
    )  # fmt: skip
    options = [item for option in (*settings, *STRATEGY) for item in ("--set", option)]
    lopa("run", "demo", "--profile", "cpu", *options, timeout=WAIT_S)
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["text"] == completed(client, max_tokens=10, suffix="\n#### 17").choices[0].text
    assert "has no hole" in second["error"]
