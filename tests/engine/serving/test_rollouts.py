"""`lopa serve` beside a trainer: weights replaced under load, pauses, memory given back and taken again."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.config import find_config, load_profile, load_run
from common.generate import build_generator
from tests.engine.serving.served import QUESTION, Served
from tests.engine.serving.test_replicas import pid_of, wait_for_all
from tests.other_weights import DEMO, write_other
from tests.soaking import soaking

pytestmark = pytest.mark.slow

PROMPTS = [QUESTION.format(number) + "\n" for number in range(10, 14)]
LENGTH = 64
TP_2 = ("--set", "mesh.branch_parallel_size=1", "--set", "mesh.tensor_parallel_size=2")
Body = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("weights")
    return [write_other(parent / f"step{number}", number) for number in (2, 4, 6)]


@pytest.fixture(scope="module")
def fresh(folders: list[Path]) -> dict[str, dict[str, str]]:
    """Texts by folder and prompt, each folder's of a start with it."""
    found = {}
    for folder in (DEMO, *folders):
        run = load_run(find_config("runs", "demo"), [f"model={folder}"])
        with build_generator(load_profile(find_config("profiles", "cpu")), run) as generator:
            texts = generator.complete(*PROMPTS, max_tokens=LENGTH, ignore_eos=True)
        found[str(folder)] = dict(zip(PROMPTS, texts, strict=True))
    first, *others = [tuple(texts.values()) for texts in found.values()]
    assert len({first, *others}) == len(found), "the texts tell the weights apart"
    return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "log", "--set", "max_num_requests=3") as server:
        yield server


def ask(served: Served, prompt: str, **changes: Any) -> Body:
    body = {"prompt": prompt, "max_tokens": LENGTH, "ignore_eos": True, **changes}
    status, answer = served.post("/generate", body)
    assert status == 200, answer
    return dict(answer)


def replace(served: Served, folder: Path, **changes: Any) -> Body:
    status, answer = served.post("/update_weights_from_disk", {"model_path": str(folder), **changes})
    assert status == 200, answer
    return dict(answer)


def card(served: Served) -> Body:
    return dict(json.loads(served.get("/v1/models")[1])["data"][0])


def resident_bytes(served: Served) -> int:
    """Memory of the process that has the engine."""
    line = next(one for one in Path(f"/proc/{served.process.pid}/status").read_text().splitlines() if "VmRSS" in one)
    return int(line.split()[1]) * 1024


class Load:
    """Clients that ask for the prompts in turns until they are told to stop, and what they got."""

    def __init__(self, served: Served, num_clients: int) -> None:
        self.answers: list[tuple[str, Body]] = []
        self._served, self._is_over = served, threading.Event()
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients: list[Future[None]] = [self._pool.submit(self._run, number) for number in range(num_clients)]

    def _run(self, number: int) -> None:
        while not self._is_over.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            self.answers.append((prompt, ask(self._served, prompt)))
            number += 1

    def end(self) -> None:
        self._is_over.set()
        for client in self._clients:
            client.result()


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=soaking)])
def test_weights_are_replaced_under_load(
    count: int, served: Served, folders: list[Path], fresh: dict[str, dict[str, str]]
) -> None:
    """More clients than slots, so that some requests wait at every replacement."""
    load, sizes, folder_of = Load(served, 5), [], {"0": str(DEMO)}
    for number in range(1, count + 1):
        folder = folders[number % len(folders)]
        folder_of[str(number)] = str(folder)
        assert replace(served, folder)["weight_version"] == str(number)
        assert card(served)["weight_version"] == str(number)
        answer = ask(served, PROMPTS[0])
        assert (answer["weight_version"], answer["text"]) == (str(number), fresh[str(folder)][PROMPTS[0]])
        sizes.append(resident_bytes(served))
    load.end()
    wrong = [
        (answer["weight_version"], answer["text"])
        for prompt, answer in load.answers
        if answer["finish_reason"] != "length" or answer["text"] != fresh[folder_of[answer["weight_version"]]][prompt]
    ]
    assert not wrong, "an answer is of one version of the weights"
    assert len(load.answers) >= count and len({answer["weight_version"] for _, answer in load.answers}) > count // 2
    model_bytes = (DEMO / "model.safetensors").stat().st_size
    assert max(sizes[count // 2 :]) < max(sizes[: count // 2]) + 2 * model_bytes, sizes
    print("RSS MiB", [size >> 20 for size in sizes], "answers", len(load.answers))


def told(served: Served, prompt: str) -> Body:
    """An answer with its log probabilities, less its ids."""
    answer = ask(served, prompt, return_logprob=True)
    meta = {key: value for key, value in answer["meta_info"].items() if key not in ("id", "weight_version")}
    assert len(meta["output_token_logprobs"]) == LENGTH
    return {"text": answer["text"], "token_ids": answer["token_ids"], **meta}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that tests pause and change, and leave as they found it."""
    folder = tmp_path_factory.mktemp("trained")
    with Served(folder / "log", "--set", "max_num_requests=2") as server:
        yield server


def test_log_probabilities_are_those_of_a_fresh_start(trained: Served, folders: list[Path], tmp_path: Path) -> None:
    before = told(trained, PROMPTS[0])
    assert replace(trained, folders[1], weight_version="step 4")["weight_version"] == "step 4"
    assert ask(trained, PROMPTS[0], return_logprob=True)["meta_info"]["weight_version"] == "step 4"
    with Served(tmp_path / "log", "--set", f"model={folders[1]}") as fresh_start:
        for prompt in PROMPTS[:2]:
            assert told(trained, prompt) == told(fresh_start, prompt)
    replace(trained, DEMO)
    assert told(trained, PROMPTS[0]) == before


def test_a_folder_that_does_not_fit_gets_a_sentence_and_changes_nothing(trained: Served) -> None:
    before = ask(trained, PROMPTS[0])
    for folder, reason in (
        ("none", "no such folder"),
        (DEMO.with_name("demo_block"), "family is sdar there and dream"),
    ):
        status, answer = trained.post("/update_weights_from_disk", {"model_path": str(folder)})
        assert status == 400 and reason in answer["error"]["message"] and answer["error"]["param"] == "model_path"
    for path, body in (
        ("/update_weights_from_disk", {}), ("/update_weights_from_disk", {"model_path": "x", "load_format": "dummy"}),
        ("/update_weights_from_disk", {"model_path": str(DEMO), "weight_version": ""}),
        ("/pause_generation", {"mode": "retract"}), ("/release_memory_occupation", {"tags": ["graphs"]}),
    ):  # fmt: skip
        assert trained.post(path, body)[0] == 400
    after = ask(trained, PROMPTS[0])
    assert (after["text"], after["weight_version"]) == (before["text"], before["weight_version"])


def test_a_pause_and_a_release_hold_requests_and_lose_none(trained: Served, folders: list[Path]) -> None:
    wanted = {prompt: ask(trained, prompt)["text"] for prompt in PROMPTS}
    for path, body, undo in (
        ("/pause_generation", {"mode": "wait"}, "/continue_generation"),
        ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, "/resume_memory_occupation"),
        ("/release_memory_occupation", {}, "/resume_memory_occupation"),
    ):  # fmt: skip
        assert trained.post(path, body) == (200, {"success": True})
        with ThreadPoolExecutor() as pool:
            held = {prompt: pool.submit(ask, trained, prompt) for prompt in PROMPTS}
            trained.wait_for(lambda: trained.metrics()["vllm:num_requests_waiting"] == len(PROMPTS), "waiting")
            assert not any(one.done() for one in held.values())
            assert trained.send("POST", undo)[0] == 200
            assert {prompt: one.result()["text"] for prompt, one in held.items()} == wanted
    assert trained.get("/flush_cache")[0] == trained.send("POST", "/flush_cache")[0] == 200


def test_a_pause_ends_what_is_open(trained: Served) -> None:
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(ask, trained, prompt, max_tokens=400) for prompt in PROMPTS]
        trained.wait_for(lambda: trained.metrics()["lopa_requests_open"] == len(PROMPTS), "open")
        assert trained.post("/pause_generation", {})[0] == 200
        assert {call.result()["finish_reason"] for call in calls} == {"abort"}
    assert trained.send("POST", "/continue_generation")[0] == 200
    assert ask(trained, PROMPTS[0])["finish_reason"] == "length"


@pytest.mark.parametrize("mesh", [pytest.param((), marks=soaking), TP_2], ids=["bp2", "tp2"])
def test_all_ranks_of_a_server_replace(
    mesh: tuple[str, ...], folders: list[Path], fresh: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    with Served(tmp_path / "log", *mesh, profile="cpu_bp2", launcher="common.commands.job") as server:
        load = Load(server, 3)
        for number, folder in enumerate(folders, 1):
            assert replace(server, folder)["weight_version"] == str(number)
            assert ask(server, PROMPTS[0])["text"] == fresh[str(folder)][PROMPTS[0]]
        assert server.post("/release_memory_occupation", {})[0] == 200
        assert server.post("/resume_memory_occupation", {})[0] == 200
        load.end()
    of = {str(number): fresh[str(folder)] for number, folder in enumerate((DEMO, *folders))}
    assert all(answer["text"] == of[answer["weight_version"]][prompt] for prompt, answer in load.answers)


def test_all_replicas_replace_and_one_that_comes_again_has_the_new_weights(
    folders: list[Path], fresh: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    settings = ("--set", "mesh.data_parallel_size=2", "--set", "serve.num_front_ends=2")
    with Served(tmp_path / "log", *settings) as server:
        wait_for_all(server)
        load = Load(server, 4)
        replace(server, folders[0], weight_version="first")
        for _ in range(8):  # whichever replica and front end
            answer = ask(server, PROMPTS[1])
            assert (answer["weight_version"], answer["text"]) == ("first", fresh[str(folders[0])][PROMPTS[1]])
        load.end()
        of = {"0": fresh[str(DEMO)], "first": fresh[str(folders[0])]}
        assert all(answer["text"] == of[answer["weight_version"]][prompt] for prompt, answer in load.answers)
        os.kill(pid_of(server, 1), signal.SIGKILL)
        server.wait_for(lambda: "dead" in server.get("/ready")[1], "gone")
        status, answer = server.post("/update_weights_from_disk", {"model_path": str(folders[1])})
        assert status == 503 and "not all replicas are ready" in answer["error"]["message"]
        wait_for_all(server)
        for _ in range(8):
            answer = ask(server, PROMPTS[1])
            assert (answer["weight_version"], answer["text"]) == ("first", fresh[str(folders[0])][PROMPTS[1]])


def test_keys_guard_these_routes(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with Served(tmp_path / "log", "--set", f"serve.api_key_file={tmp_path / 'keys'}") as server:
        for path in ("/pause_generation", "/update_weights_from_disk", "/release_memory_occupation", "/flush_cache"):
            assert server.send("POST", path, b"{}")[0] == 401
        assert server.send("POST", "/flush_cache", Authorization="Bearer secret")[0] == 200
