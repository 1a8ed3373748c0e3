"""Repositories by name: what is fetched, what is asked of the hub, what stays, and what is said when it cannot be."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub import COMMIT, OTHER_COMMIT, Hub, serving
from huggingface_hub import constants

import common.commands.arguments.found as found
from common.batch.identity import identity
from common.batch.inputs import Input
from common.commands.arguments.found import load_both
from common.commands.arguments.options import save_run_file
from common.commands.job import plan_job
from common.config import find_config, folder_of, load_profile, load_run, short_name
from common.errors import ConfigError
from common.hub import HubName, fetch, name_of, weight_bytes
from common.hub.listing import has_all

ROOT = Path(__file__).resolve().parents[3]
NAME = "hf://demo-org/demo"
FETCH = "import sys; from common.hub import fetch; print(fetch(sys.argv[1]))"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The demo model, with files that are not to be fetched."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "merges.txt"):
        os.link(ROOT / "models" / "demo" / name, folder / name)
    for name in ("modeling_demo.py", "pytorch_model.bin", "README.md", "original/more.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not for us")
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    fetch.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(Hub({"demo-org/demo": repository})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield hub
    fetch.cache_clear()


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Another process that fetches a repository; it prints the folder."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    def begin(name: str = NAME, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", FETCH, name], env=environment | more, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return begin


def again() -> None:
    """Look again, as a new process would."""
    fetch.cache_clear()


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again()


# What a name is


@pytest.mark.parametrize(
    ("text", "scheme", "revision"),
    [
        ("hf://Dream-org/Dream-v0-Instruct-7B", "hf", None),
        ("hf://a/b.c_d@v1.0", "hf", "v1.0"),
        ("hf://a/b@refs/pr/3", "hf", "refs/pr/3"),
        ("modelscope://JetLM/SDAR-8B@master", "modelscope", "master"),
    ],
)
def test_a_name_is_read_and_written_alike(text: str, scheme: str, revision: str | None) -> None:
    name = HubName.parse(text)
    assert (name.scheme, name.revision, str(name)) == (scheme, revision, text)


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://a", "hf://a/b/c", "hf:a/b", "hf://../b", "hf://a/b--c", "hf://a/..", "hf://a/b@", "hf://a/b@../../x",
     "hf://a/b@x/..", "hf://a/b c", "hf:///etc/passwd", "hf://a/b\n"],
)  # fmt: skip
def test_what_is_no_name_is_told_before_a_hub_is_asked(hub: Hub, text: str) -> None:
    with pytest.raises(ConfigError, match="write hf://OWNER/NAME, or hf://OWNER/NAME@REVISION"):
        load_run(text)
    assert not hub.requests


def test_a_bare_name_asks_nobody_and_is_told_the_scheme(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"for a repository of a hub write hf://demo-org/demo, or modelscope://demo"):
        load_run("demo-org/demo")
    for path in ("models/dmeo", "checkpoints/x", "demo-org", "a/b/c"):
        with pytest.raises(ConfigError) as caught:
            load_run(path)
        assert "hf://" not in str(caught.value)
    assert not hub.requests


# What is fetched


def test_a_run_is_a_name_and_its_folder_has_no_programs(hub: Hub) -> None:
    run = load_run(NAME)
    folder = Path(run.model)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert str(name_of(folder)) == f"{NAME}@{COMMIT}"
    assert not any(word in line for line in hub.requests for word in (".py", ".bin", "README", "original"))


def test_settings_alone_are_enough_for_an_estimate_and_for_dummy_weights(hub: Hub) -> None:
    _, run = load_both("cpu", NAME, [], with_weights=False)
    assert run.load_format == "auto" and load_run(NAME, ["load_format=dummy"]).model == run.model
    assert folder_of(NAME, with_weights=False) == run.model and not hub.downloads("model.safetensors")
    assert weight_bytes(run.model) == (ROOT / "models/demo/model.safetensors").stat().st_size


def test_a_tokenizer_and_a_lora_have_names_too(hub: Hub, repository: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    shutil.copyfile(repository / "model.safetensors", adapter / "adapter_model.safetensors")
    hub.repositories["demo-org/lora"] = adapter
    (tmp_path / "run.yaml").write_text(f"model: x\ntokenizer: {NAME}\nlora_path: hf://demo-org/lora@v1\n")
    run = load_run(tmp_path / "run.yaml")
    assert run.model == "x" and (Path(str(run.tokenizer)) / "tokenizer.json").is_file()
    assert (Path(str(run.lora_path)) / "adapter_model.safetensors").is_file()
    assert not hub.downloads("model.safetensors"), "of a tokenizer's repository no weights are fetched"


def test_what_is_there_is_not_fetched_again_and_a_commit_costs_no_request(hub: Hub) -> None:
    folder = fetch(NAME)
    again()
    hub.requests.clear()
    assert fetch(NAME) == folder and not any(line.startswith("GET /demo-org") for line in hub.requests)
    hub.requests.clear()
    assert fetch(f"{NAME}@{COMMIT}") == folder and not hub.requests


def test_a_branch_that_moved_brings_what_changed_alone(hub: Hub, repository: Path) -> None:
    before = fetch(NAME)
    again()
    hub.commit = OTHER_COMMIT
    (repository / "merges.txt").unlink()
    (repository / "merges.txt").write_text("#version: 0.2\n")
    after = fetch(NAME)
    assert after.name == OTHER_COMMIT and (after / "merges.txt").read_text() == "#version: 0.2\n"
    assert len(hub.downloads("model.safetensors")) == 1 and (before / "merges.txt").read_text() != "#version: 0.2\n"


# What breaks off


def test_a_connection_that_breaks_goes_on_where_it_broke(hub: Hub, repository: Path) -> None:
    hub.cut["model.safetensors"] = 12_000_000
    folder = fetch(NAME)
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    first, second = hub.downloads("model.safetensors")
    assert first.endswith(" ") and int(second.partition("bytes=")[2].rstrip("-")) > 0


def test_an_index_that_is_nested_too_deep_is_left_to_loading(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert has_all(tmp_path, with_weights=True)


@pytest.mark.slow
def test_a_killed_download_keeps_whole_files(
    hub: Hub, repository: Path, start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "model.safetensors").rename(repository / "model-1.safetensors")
    (repository / "model-2.safetensors").write_bytes(b"second")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (repository / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    hub.held = {"model-2.safetensors"}
    process = start()
    blobs = Path(constants.HF_HUB_CACHE) / "models--demo-org--demo" / "blobs"
    size = (repository / "model-1.safetensors").stat().st_size

    def is_whole(path: Path) -> bool:
        with suppress(FileNotFoundError):  # one that has just been renamed
            return path.suffix != ".incomplete" and path.stat().st_size == size
        return False

    while not any(map(is_whole, blobs.glob("*"))):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.wait()
    offline(monkeypatch)
    with pytest.raises(ConfigError, match="only a part of it has been fetched before"):
        fetch(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.held, hub.requests[:] = set(), []
    hub.release.set()
    folder = fetch(NAME)
    assert (folder / "model-2.safetensors").read_bytes() == b"second"
    assert not hub.downloads("model-1.safetensors"), "it was whole"


@pytest.mark.slow
def test_one_of_several_processes_downloads_while_the_others_wait(
    hub: Hub, start: Callable[..., subprocess.Popen[str]]
) -> None:
    hub.held = {"model.safetensors"}
    processes = [start() for _ in range(3)]
    while (
        not hub.downloads("model.safetensors")
        or sum("GET /api/models/demo-org/demo " in line for line in hub.requests) < 3
    ):
        assert all(process.poll() is None for process in processes)
    hub.held = set()
    hub.release.set()
    folders = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(folders) == 1 and (Path(folders.pop()) / "model.safetensors").is_file()
    assert len(hub.downloads("model.safetensors")) == 1


@pytest.mark.slow
def test_a_waiting_process_learns_of_a_failure_by_its_own_try(
    hub: Hub, start: Callable[..., subprocess.Popen[str]]
) -> None:
    hub.gated.add("demo-org/demo")
    ended = [process.communicate(timeout=60)[1] for process in [start(), start()]]
    assert all("gated: ask for access" in text for text in ended)


# What cannot be


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf://demo-org/dmeo", r"has no such repository, or it is private: correct the name, or set HF_TOKEN"),
        ("hf://demo-org/demo@v2", r"the repository has no revision v2: name a branch, a tag or a commit"),
    ],
)
def test_a_wrong_name_and_a_wrong_revision_are_told(hub: Hub, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fetch(name)


def test_a_gated_repository_is_told_with_what_to_do(hub: Hub) -> None:
    hub.gated.add("demo-org/demo")
    with pytest.raises(
        ConfigError, match=r"gated: ask for access at http://127.0.0.1:\d+/demo-org/demo, then set HF_TOKEN"
    ):
        fetch(NAME)


def test_without_a_network_what_is_there_is_taken_else_it_is_told(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"127.0.0.1:1 does not answer .*nothing of it has been fetched before"):
        fetch(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    folder = fetch(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    again()
    assert fetch(NAME) == folder and "taking what an earlier start has fetched" in caplog.text
    offline(monkeypatch)
    assert fetch(NAME) == folder and "HF_HUB_OFFLINE keeps it from being asked for" in caplog.text
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE .*nothing of it has been fetched before"):
        fetch("hf://demo-org/other")


def test_settings_without_weights_are_a_part_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(NAME, with_weights=False)
    offline(monkeypatch)
    assert fetch(NAME, with_weights=False).is_dir()
    with pytest.raises(ConfigError, match="only a part of it has been fetched before"):
        fetch(NAME)


def test_a_repository_without_safetensors_is_told_before_anything_is_fetched(hub: Hub, repository: Path) -> None:
    (repository / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"holds no .safetensors \(it has pytorch_model.bin\), and other weights are not"
    ):
        load_both("cpu", NAME, [])
    assert not hub.downloads("pytorch_model.bin")
    (repository / "config.json").unlink()
    for mark in repository.glob("tokenizer*"):
        mark.unlink()
    again()
    with pytest.raises(ConfigError, match=r"a repository without config.json, so not of a model"):
        fetch(NAME)


def test_a_full_disk_is_told_before_and_meanwhile(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**24, 2**23, 2**23))  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"14.\d MiB are to be fetched and .* has 8.0 MiB left: make room, or set HF_HOME"
    ):
        fetch(NAME)
    assert not hub.downloads("model.safetensors")
    monkeypatch.undo()

    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    with pytest.raises(ConfigError, match=r"no room is left in .*start again to go on"):
        fetch(NAME)


def test_too_little_memory_is_told_before_the_weights_are_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "memory_bytes", lambda: 2**20)
    with pytest.raises(
        ConfigError, match=r"demo-org/demo@c0ffee0*: its weights take 0.0 GiB in float32 .*smaller dtype"
    ):
        load_both("cpu", NAME, [])
    assert not hub.downloads("model.safetensors") and load_both("cpu", NAME, ["load_format=dummy"])


# What it is known by


def test_results_are_resumed_from_another_cache_and_not_with_other_files(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    files = [f"input.path={tmp_path}/in.jsonl", f"output.path={tmp_path}/out.jsonl"]
    profile = load_profile("cpu")

    def known() -> dict[str, Any]:
        again()
        return identity(profile, load_run(NAME, files), Input([], 0, ""))

    first = known()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    second = known()
    assert first == second
    assert first["model"] == NAME and first["model.real_path"] == f"{NAME}@{COMMIT}"
    assert str(tmp_path) not in json.dumps({key: value for key, value in first.items() if not key.startswith("input")})


def test_a_saved_run_has_the_commit_and_outputs_have_the_name(hub: Hub, tmp_path: Path) -> None:
    save_run_file(tmp_path / "saved.yaml", load_run(NAME))
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text())["model"] == f"{NAME}@{COMMIT}"
    assert short_name(f"{NAME}@v1.0") == "demo" and short_name("runs/demo.yaml") == "demo"


def test_a_launcher_fetches_and_its_processes_ask_no_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"model: {NAME}\ninput: {{path: x.jsonl}}\noutput: {{path: {tmp_path}/y.jsonl}}\n"
    )
    dry, _, _ = plan_job(["run", "cpu", str(tmp_path / "run.yaml")], {"DRY_RUN": "true"})
    assert not hub.downloads("model.safetensors") and "snapshots" in " ".join(dry.worker)
    for model in (NAME, str(tmp_path / "run.yaml")):
        job, _, run = plan_job(["run", "cpu", model], {})
        assert f"model={json.dumps(run.model)}" in job.worker and name_of(run.model)
        assert not any(word.startswith("hf://") for word in job.worker)
    assert hub.downloads("model.safetensors")


def test_a_run_is_found_by_its_name(hub: Hub) -> None:
    assert name_of(find_config("runs", NAME)) == HubName("hf", "demo-org/demo", COMMIT)
    for folder in ("models/demo", "/x/snapshots/abc", "/models--a--b/snapshot/abc", "/models--a/snapshots/abc"):
        assert name_of(folder) is None


# ModelScope


def test_modelscope_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.cache_clear()
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(ConfigError, match="names of ModelScope need its package: pip install modelscope-hub"):
        load_run("modelscope://demo-org/demo")


@pytest.mark.slow
def test_modelscope_fetches_the_same_files(
    hub: Hub, repository: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    pytest.importorskip("modelscope_hub", reason="needs modelscope-hub")
    variables = {"MODELSCOPE_ENDPOINT": hub.url, "MODELSCOPE_CACHE": str(tmp_path / "ms")}
    process = start("modelscope://demo-org/demo", **variables)
    told, problems = process.communicate(timeout=60)
    folder = Path(told.strip().splitlines()[-1])
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == [
        "config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ], problems  # fmt: skip
    assert str(name_of(folder)) == "modelscope://demo-org/demo@master"
    absent = start("modelscope://demo-org/dmeo", **variables).communicate(timeout=60)[1]
    assert "no such repository, or it is private: correct the name, or set MODELSCOPE_API_TOKEN" in absent
    unreachable = start("modelscope://demo-org/demo", **{**variables, "MODELSCOPE_ENDPOINT": "http://127.0.0.1:1"})
    told, problems = unreachable.communicate(timeout=120)
    assert told.strip().splitlines()[-1] == str(folder) and "taking what an earlier start has fetched" in problems
