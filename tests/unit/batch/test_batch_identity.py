"""What makes two starts one run: settings, the input's first bytes, and what the model's folder holds."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_files import Interrupted, StopsAfter, execute, output_path, records, without_this_start, write_input
from safetensors.torch import save_file

from common.batch import model_files, run_batch
from common.batch.files import sidecar_path
from common.batch.model_files import digests
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError


@pytest.fixture
def with_model(run: RunConfig, tmp_path: Path) -> RunConfig:
    """The run with a checkpoint folder and a LoRA folder that have files in them."""
    for name in ("model", "lora"):
        (tmp_path / name).mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "Dream"}')
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (tmp_path / "lora/adapter_config.json").write_text('{"r": 4}')
    write_weights(tmp_path / "model/model.safetensors", 1)
    write_weights(tmp_path / "lora/adapter_model.safetensors", 1)
    write_input(run, [{"id": number, "prompt": "abc"} for number in range(5)])
    folders = {"model": str(tmp_path / "model"), "lora_path": str(tmp_path / "lora")}
    return run.model_copy(update=folders)


def write_weights(path: Path, value: float, rows: int = 64) -> None:
    save_file({"a.weight": torch.full((rows, 64), value), "norm.weight": torch.ones(64)}, path)


def stop_in_the_middle(profile: DeviceProfile, run: RunConfig) -> None:
    with pytest.raises(Interrupted):
        run_batch(profile, run, lambda: StopsAfter(profile, run))
    assert len(records(run)) == 2


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("model/model.safetensors", None, r"the model's content changed: model\.safetensors"),
        ("model/config.json", '{"model_type": "dream"}', r"the model's content changed: config\.json"),
        ("model/tokenizer.json", "{ }", r"the model's content changed: tokenizer\.json"),
        ("model/chat_template.jinja", "{{ x }}", r"the model's content changed: chat_template\.jinja"),
        ("lora/adapter_model.safetensors", None, r"the LoRA's content changed: adapter_model\.safetensors"),
        ("lora/adapter_config.json", '{"r": 8}', r"the LoRA's content changed: adapter_config\.json"),
    ],
)
def test_a_model_that_changes_in_the_middle_of_a_run_is_not_resumed(
    cpu: DeviceProfile, with_model: RunConfig, tmp_path: Path, file: str, content: str | None, sentence: str
) -> None:
    stop_in_the_middle(cpu, with_model)
    if content is None:  # of the same shapes, size and time
        time = (tmp_path / file).stat().st_mtime
        write_weights(tmp_path / file, 2)
        os.utime(tmp_path / file, (time, time))
    else:
        (tmp_path / file).write_text(content)
    before = records(with_model)
    with pytest.raises(ConfigError, match=sentence + r"\): choose another output.path, or pass --overwrite"):
        execute(cpu, with_model)
    assert records(with_model) == before
    execute(cpu, with_model, overwrite=True)
    execute(cpu, with_model)
    assert len(records(with_model)) == 5


def test_a_file_that_is_gone_from_the_model_is_named(cpu: DeviceProfile, with_model: RunConfig, tmp_path: Path) -> None:
    stop_in_the_middle(cpu, with_model)
    (tmp_path / "model/tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"the model's content changed: tokenizer\.json"):
        execute(cpu, with_model)


def test_results_and_notes_in_the_model_folder_are_not_its_content(
    cpu: DeviceProfile, with_model: RunConfig, tmp_path: Path
) -> None:
    stop_in_the_middle(cpu, with_model)
    for name in ("o.jsonl", "o.jsonl.run.json", "o.metrics.json", "README.md", ".model.safetensors.partial"):
        (tmp_path / "model" / name).write_text("{}")
    execute(cpu, with_model)
    assert len(records(with_model)) == 5


def test_the_same_files_written_again_are_the_same_model_with_a_warning(
    cpu: DeviceProfile, with_model: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop_in_the_middle(cpu, with_model)
    os.utime(tmp_path / "model/model.safetensors", (2e9, 2e9))
    execute(cpu, with_model)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "the files of the model were written again since the first start" in warnings[0]
    assert "--overwrite" in warnings[0]


def test_weights_that_are_made_up_are_not_read(cpu: DeviceProfile, with_model: RunConfig, tmp_path: Path) -> None:
    dummy = with_model.model_copy(update={"load_format": "dummy"})
    stop_in_the_middle(cpu, dummy)
    write_weights(tmp_path / "model/model.safetensors", 2)
    execute(cpu, dummy)


def test_a_finished_run_still_says_so_when_its_model_is_gone(
    cpu: DeviceProfile, with_model: RunConfig, tmp_path: Path
) -> None:
    first = execute(cpu, with_model)
    shutil.rmtree(tmp_path / "model")
    assert execute(cpu, with_model) == without_this_start(first)


def test_two_spellings_of_a_path_are_one_model(
    cpu: DeviceProfile, with_model: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("model")
    execute(cpu, with_model.model_copy(update={"model": "./model", "lora_path": "lora"}))
    for model, lora in (("model", "./lora"), ("link", "lora/"), (f"{tmp_path}/model", f"{tmp_path}/out/../lora")):
        execute(cpu, with_model.model_copy(update={"model": model, "lora_path": lora}))
    monkeypatch.chdir(tmp_path / "out")
    execute(cpu, with_model.model_copy(update={"model": "../model", "lora_path": "../lora"}))
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"model was '\./model', is '.*/other'"):
        execute(cpu, with_model.model_copy(update={"model": str(tmp_path / "other"), "lora_path": "../lora"}))
    with pytest.raises(ConfigError, match=r"lora_path was 'lora', is None"):
        execute(cpu, with_model.model_copy(update={"model": "../model", "lora_path": None}))


def as_of_an_earlier_version(run: RunConfig, **changes: Any) -> None:
    """The sidecar as it was written before the model's content was in it."""
    sidecar = sidecar_path(output_path(run))
    recorded = {**json.loads(sidecar.read_text()), **changes}
    new = ("model.", "lora_path.")
    sidecar.write_text(json.dumps({key: value for key, value in recorded.items() if not key.startswith(new)}))


def test_an_output_of_an_earlier_version_is_resumed(
    cpu: DeviceProfile, with_model: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stop_in_the_middle(cpu, with_model)
    as_of_an_earlier_version(with_model, model="./model")
    write_weights(tmp_path / "model/model.safetensors", 2)  # what was not recorded cannot be compared
    execute(cpu, with_model)
    assert len(records(with_model)) == 5
    as_of_an_earlier_version(with_model, model="./another")
    with pytest.raises(ConfigError, match=r"model was '\./another', is"):
        execute(cpu, with_model)


def test_a_key_that_is_new_is_not_compared_but_a_known_one_is(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "abc"}])
    execute(cpu, run)
    sidecar = sidecar_path(output_path(run))
    recorded = json.loads(sidecar.read_text())
    for key in ("load_format", "input.add_bos_token", "model.real_path"):
        sidecar.write_text(json.dumps({name: value for name, value in recorded.items() if name != key}))
        execute(cpu, run)
    with pytest.raises(ConfigError, match="seed was 0, is 1"):
        execute(cpu, run.model_copy(update={"seed": 1}))


def test_an_overwritten_output_is_known_by_all_of_its_input(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "a"}])
    execute(cpu, run)
    write_input(run, [{"prompt": "a"}, {"prompt": "b"}])
    execute(cpu, run, overwrite=True)
    write_input(run, [{"prompt": "a"}, {"prompt": "c"}])
    with pytest.raises(ConfigError, match="input_sha256"):
        execute(cpu, run)


# The digest of a folder


def test_large_weights_are_told_apart_by_a_change_in_any_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_READ_WHOLE", 1000)
    path = tmp_path / "model.safetensors"

    def digest(**changes: torch.Tensor) -> str:
        tensors = {f"layer.{number}": torch.zeros(5000) for number in range(30)}
        save_file({**tensors, "norm": torch.ones(8), **changes}, path)
        found = digests(tmp_path)
        assert found is not None
        return found["model.safetensors"]

    plain = digest()
    assert digest() == plain
    changes = {f"layer.{number}": torch.full((5000,), 1e-30) for number in range(30)}
    found = {digest(**{name: tensor}) for name, tensor in changes.items()}
    assert plain not in found and len(found) == 30
    assert digest(norm=torch.full((8,), 2.0)) != plain
    assert digest(**{"layer.3": torch.zeros(5000, dtype=torch.int32)}) != plain
    assert digest(**{"layer.3": torch.zeros(50, 100)}) != plain


def test_large_weights_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    with path.open("rb+") as stream:
        stream.truncate(10**11)  # 100 GB, none of which are on the disk
    found = digests(tmp_path)
    assert found is not None and found.keys() == {"model.safetensors"}


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b'\x09\0\0\0\0\0\0\0{"a": []}', b"\x80\0\0\0\0\0\0\0" + b"[" * 128],
)
def test_a_file_that_only_says_it_is_weights_still_has_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    monkeypatch.setattr(model_files, "_READ_WHOLE", 0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + b"x" * 10_000)
    first = digests(tmp_path)
    path.write_bytes(header + b"x" * 9_000 + b"y" * 1_000)
    assert first is not None and digests(tmp_path) != first


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "config.json").mkdir()
    assert digests(tmp_path) == {}
    assert digests(tmp_path / "absent") is None


@pytest.mark.parametrize(("seconds", "year"), [(4e11, "9999"), (-4e11, "0001"), (0.0, "1970")])
def test_a_file_of_a_clock_that_was_wrong_has_a_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, year: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    is_folder = os.stat_result((stat.S_IFDIR, *[0] * 6, seconds, seconds, seconds))
    monkeypatch.setattr(Path, "stat", lambda *_, **__: is_folder)
    monkeypatch.setattr(model_files, "_files", lambda *_: [tmp_path / "config.json"])
    assert (model_files.last_change(tmp_path) or "").startswith(year)
