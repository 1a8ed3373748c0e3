"""JSON and texts of a folder: whatever they hold, an object comes out or one sentence that names the file."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from fuzzing import bounded

from common.checkpoint import SafetensorsFolder, load_model_config, load_tokenizer
from common.checkpoint.folder import existing_folder, has_file, plain, read_json_object, read_text, shown
from common.errors import ConfigError

RUNS = Path(__file__).parents[3] / "configs" / "runs"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 1_000_000, "nested deeper than 100"),
        (b'{"a": ' * 1_000_000, "nested deeper than 100"),
        (b'{"a":' + b"[" * 101 + b"]" * 101 + b"}", "nested deeper than 100"),
        (b'{"a": [' + b"[]," * 4_000_000 + b"[]]}", "holds more than 4000000 values"),
        (b'{"a": ' + b"9" * 10_000_000 + b"}", "not valid JSON .an integer of 10000000 digits"),
        (b'{"a": "' + b"x" * 17 * 2**20 + b'"}', "larger than 16 MiB"),
        (b'{"a": "\xe9"}', "not UTF-8 text .* at byte 7"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 text"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON .*BOM"),
        (b"{\n\n}\n}", "not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"", "not valid JSON"),
    ],
)
def test_what_no_model_needs_is_refused_by_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with bounded(seconds=10, gibibytes=1), pytest.raises(ConfigError, match=rf"config\.json: {message}") as caught:
        read_json_object(path)
    assert "\n" not in str(caught.value)


def test_what_some_models_have_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_max_length": 1000000000000000019884624838656, "deep": ' + "[" * 98 + "]" * 98 + "}")
    assert read_json_object(path)["model_max_length"] == int(1e30)
    path.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_json_object(path)["time_step_limit"] == [0.0, float("inf")]


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a: no such file"):
        read_json_object(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"no such file"):
        read_json_object(tmp_path / ("a" * 300))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: no regular file"):
        read_json_object(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"cannot be read .Is a directory"):
        read_text(tmp_path)


def test_a_name_of_a_hub_comes_with_its_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="for a repository of a hub write hf://Dream-org/Dream-v0-Instruct-7B, or"):
        existing_folder("Dream-org/Dream-v0-Instruct-7B")


def test_what_may_be_a_folder_is_never_called_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    names = (
        "mine/dmeo", "nowhere", "/nowhere/model", "a/b/c", "../a", "./a/b", "~/a", "a" * 300, "configs/models",
        "tests/golden",
    )  # fmt: skip
    for name in names:
        with pytest.raises(ConfigError, match=r"no such folder; download the checkpoint and set `model`") as caught:
            existing_folder(name)
        assert "hf://" not in str(caught.value)
        assert name.startswith("/") or f"(looked for in {tmp_path})" in str(caught.value)
    for is_there in (False, True):
        if is_there:
            (tmp_path / "models").mkdir()
        for name in ("models/demo", "models/demo/", "models", Path("models/dmeo")):
            with pytest.raises(ConfigError, match=r"no such folder|the demo models come with a checkout") as caught:
                existing_folder(name if is_there is False else "models/dmeo")
            assert "come with a checkout: start in its folder" in str(caught.value)
            assert "hf://" not in str(caught.value)


@pytest.mark.parametrize("run", sorted(RUNS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_run_says_what_to_download(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = run.read_text()
    for setting, folder in re.findall(r"^(model|lora_path): (checkpoints/\S+)", text, re.MULTILINE):
        assert re.search(rf"^#.* [\w-]+/{folder.removeprefix('checkpoints/')}[ ,.]", text, re.MULTILINE)
        with pytest.raises(ConfigError, match=f"the run file say which checkpoint to download .* `{setting}`"):
            existing_folder(folder, setting)


def test_values_and_names_are_shown_in_one_short_line() -> None:
    for value in ("x\ny" * 1000, ["a"] * 1000, 10**4000, {"a": {"b": [1] * 99}}, "\ud800", float("nan")):
        assert shown(value).isprintable() and len(shown(value)) < 200
    assert plain("model.layers.0.weight") == "model.layers.0.weight"
    for name in ("a\nb", "\ud800", "x" * 10_000):
        assert plain(name).isprintable() and len(plain(name)) < 100


@pytest.mark.parametrize(("kind", "what"), [("folder", "a folder"), ("pipe", "no regular file"), ("link", "a link")])
def test_what_stands_in_the_place_of_an_optional_file_is_refused(tmp_path: Path, kind: str, what: str) -> None:
    path = tmp_path / "generation_config.json"
    assert not has_file(path) and not has_file(tmp_path / ("x" * 300)) and not has_file(tmp_path / "a\0b")
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("gone")}[kind]()
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {what}.*; download it again, or remove it"):
        has_file(path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "model.safetensors"],
)
def test_a_link_whose_file_is_gone_is_not_passed_over(tmp_path: Path, name: str) -> None:
    """As a download that was cut leaves one: without the file the model may answer otherwise."""
    folder = tmp_path / "m"
    shutil.copytree(RUNS.parents[1] / "models" / "demo", folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("gone")
    with pytest.raises(ConfigError, match=rf"{name}: a link that leads to no file"):
        for read in (load_model_config, load_tokenizer, SafetensorsFolder):
            read(folder)
