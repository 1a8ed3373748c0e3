"""A request that fails while it is decoded: its client gets the reason, and nobody else hears of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.poisoned import BAD, GOOD, poison
from tests.engine.serving.served import Served, events_of
from tests.engine.serving.storms import FEW_BRANCHES
from tests.soaking import soaking

ANSWER = {"max_tokens": 32, "ignore_eos": True}


def served_on(folder: Path, bp: int, tp: int, **options: Any) -> Served:
    mesh = [f"mesh.branch_parallel_size={bp}", f"mesh.tensor_parallel_size={tp}", f"model={poison(folder, **options)}"]
    arguments = [item for setting in mesh for item in ("--set", setting)]
    launcher = "common.commands" if bp * tp == 1 else "common.commands.job"
    return Served(folder / "log", *FEW_BRANCHES, *arguments, launcher=launcher)


MESHES = [pytest.param((1, 1)), pytest.param((2, 1), marks=pytest.mark.slow), pytest.param((1, 2), marks=soaking)]


@pytest.fixture(scope="module", params=MESHES, ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_on(tmp_path_factory.mktemp("served"), *request.param) as server:
        yield server


@pytest.mark.slow
def test_the_client_gets_an_error_of_openais_form_and_the_others_their_answers(served: Served) -> None:
    def ask(text: str) -> tuple[int, Any]:
        return served.post("/v1/completions", {"prompt": text, **ANSWER})

    texts = [GOOD.format(10), GOOD.format(11), GOOD.format(12)]
    alone = [ask(text)[1]["choices"][0]["text"] for text in texts]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, [texts[0], BAD, texts[1], BAD, texts[2], BAD]))
    assert [body["choices"][0]["text"] for _, body in answers[::2]] == alone
    for status, body in answers[1::2]:
        assert status == 500 and body["error"]["type"] == "InternalServerError" and body["error"]["code"] == 500
        assert body["error"]["message"].startswith("the model's output is not finite for this request: its weights")
    status, body = served.post("/v1/completions", {"prompt": BAD, **ANSWER, "temperature": 0.5})
    assert status == 500 and "send it with temperature 0" in body["error"]["message"]
    assert ask(texts[0])[1]["choices"][0]["text"] == alone[0]
    served.wait_for(served.is_empty, "empty", 30)
    assert "Traceback" not in served.text and served.get("/health")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "more"),
    [("/v1/completions", {}), ("/generate", {"stream_mode": "denoise"}), ("/v1/completions", {"n": 3})],
)
def test_a_stream_ends_with_an_error_event(served: Served, route: str, more: dict[str, Any]) -> None:
    drawn = {"temperature": 0.5} if "n" in more else {}
    body = {"prompt": BAD, **ANSWER, "stream": True, **more, **drawn}
    status, text = served.send("POST", route, json.dumps(body).encode())
    (event,) = events_of(text)
    assert status == 200 and event["error"]["code"] == 500 and "not finite" in event["error"]["message"]
    served.wait_for(served.is_empty, "empty", 30)


@pytest.mark.slow
def test_a_model_that_has_numbers_for_nobody_ends_the_server(tmp_path: Path) -> None:
    with served_on(tmp_path, 1, 1, all_rows=True) as server:
        status, body = server.post("/v1/completions", {"prompt": GOOD.format(10), **ANSWER})
        assert status == 500 and "not finite" in body["error"]["message"]
        assert server.process.wait(60) != 0
        assert "not even for a prompt of one token: its weights hold NaN" in server.text
        assert "Traceback" not in server.text
