"""`lopa serve hf://OWNER/NAME`, from nothing to an answer over HTTP, against a hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import Hub, serving
from started import lopa

from tests.engine.serving.served import QUESTION, ROOT, WAIT_S, Served

pytestmark = pytest.mark.slow
NAME = "hf://demo-org/demo"
BODY = {"prompt": QUESTION.format(12) + "\n", "max_tokens": 64}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({"demo-org/demo": ROOT / "models" / "demo"})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def test_a_name_is_fetched_and_answers_and_the_next_start_needs_no_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(tmp_path / "first", model=NAME) as served:
        assert '"id":"demo-org/demo"' in served.get("/v1/models")[1]
        status, answer = served.post("/v1/completions", {**BODY, "model": "demo-org/demo"})
        assert status == 200 and "17" in answer["choices"][0]["text"]
    assert len(hub.downloads("model.safetensors")) == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with Served(tmp_path / "second", model=NAME) as served:
        assert served.post("/v1/completions", BODY)[1]["choices"] == answer["choices"]
        assert "taking what an earlier start has fetched" in served.text


def test_several_ranks_are_given_what_their_launcher_has_fetched(hub: Hub, tmp_path: Path) -> None:
    settings = ("--set", "mesh.branch_parallel_size=2")
    with Served(tmp_path / "log", *settings, model=NAME, launcher="common.commands.job") as served:
        assert "17" in served.post("/v1/completions", BODY)[1]["choices"][0]["text"]
    assert len(hub.downloads("model.safetensors")) == 1
    assert len(hub.downloads("config.json")) == 1, "the launcher has it, and no rank asks once more"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf://demo-org/dmeo", "has no such repository, or it is private: correct the name, or set HF_TOKEN"),
        ("hf://demo", "write hf://OWNER/NAME"),
    ],
)
def test_a_wrong_name_ends_before_a_port_is_listened_on(hub: Hub, name: str, sentence: str) -> None:
    run = lopa("serve", name, "--profile", "cpu", "--port", "0", timeout=WAIT_S)
    assert run.returncode == 2 and sentence in run.stderr
    assert "listening" not in run.stderr and "Traceback" not in run.stderr
