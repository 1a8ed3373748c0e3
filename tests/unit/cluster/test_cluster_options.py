"""What a replica takes of a Ray cluster, what its processes find in their environment, and what a row means."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from common.batch import InputLine
from common.cluster import ray_options
from common.cluster.options import one_replica, with_whole_paths
from common.cluster.processes import environment_of
from common.cluster.rows import line_of
from common.cluster.serve import AppArguments, _arguments
from common.config import DeviceProfile, InputConfig, RunConfig, load_profile, load_run
from common.errors import ConfigError

ROOT = Path(__file__).parents[3]
SOURCE = InputConfig(path="-")


def profile_of(device: str, **changes: Any) -> DeviceProfile:
    return DeviceProfile.model_validate({"name": "p", "engine": "auto", "device": device, **changes})


def test_a_replica_takes_a_device_for_each_of_its_processes() -> None:
    mesh = {"data_parallel_size": 4, "branch_parallel_size": 2, "tensor_parallel_size": 2}
    assert ray_options(profile_of("cuda", mesh=mesh)) == {"num_cpus": 4, "num_gpus": 4}
    assert ray_options(profile_of("npu", mesh=mesh)) == {"num_cpus": 4, "resources": {"NPU": 4}}
    assert ray_options(profile_of("cpu")) == {"num_cpus": 1}


def test_mesh_auto_is_one_device_a_replica() -> None:
    assert ray_options(profile_of("npu", mesh="auto")) == {"num_cpus": 1, "resources": {"NPU": 1}}
    assert one_replica(profile_of("npu", mesh="auto")).mesh == profile_of("npu").mesh


def test_devices_are_in_ascending_order_and_threads_those_of_the_profile() -> None:
    profile = profile_of("npu", environment={"OMP_NUM_THREADS": 3})
    found = environment_of(profile, {"ASCEND_RT_VISIBLE_DEVICES": "10,9", "OMP_NUM_THREADS": "1", "PYTHONPATH": "x"})
    assert found["ASCEND_RT_VISIBLE_DEVICES"] == "9,10"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["PYTHONPATH"] == f"{ROOT}:x"


@pytest.mark.parametrize("devices", ["", "GPU-5a1f"])
def test_devices_that_are_no_numbers_are_left_alone(devices: str) -> None:
    found = environment_of(profile_of("cuda"), {"CUDA_VISIBLE_DEVICES": devices})
    assert found["CUDA_VISIBLE_DEVICES"] == devices


def test_folders_that_are_here_are_named_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    run = with_whole_paths(RunConfig(model="model", lora_path="elsewhere"))
    assert (run.model, run.lora_path, run.tokenizer) == (str(tmp_path / "model"), "elsewhere", None)


def test_a_row_of_columns_is_a_line() -> None:
    row = {"id": np.int64(7), "messages": np.array([{"role": "user", "content": "Hi", "name": None}]), "prompt": None}
    assert line_of(1, row, SOURCE) == InputLine(7, 1, {"id": 7, "messages": [{"role": "user", "content": "Hi"}]})


@pytest.mark.parametrize("row", [{"prompt": "Hi"}, {"id": None, "prompt": "Hi"}, {"id": np.nan}])
def test_a_row_without_an_id_says_so(row: dict[str, Any]) -> None:
    assert "the row has no id" in (line_of(3, row, SOURCE).error or "")


def test_what_a_line_may_not_be_a_row_may_not_be() -> None:
    assert (
        line_of(3, {"id": np.float64(0.5), "prompt": "Hi"}, SOURCE).error == "line 3: id must be a string or an integer"
    )
    assert "give exactly one of prompt, messages, question" in (line_of(3, {"id": 1}, SOURCE).error or "")


def test_the_shipped_serve_config_builds() -> None:
    (app,) = yaml.safe_load((ROOT / "configs" / "cluster" / "ray_serve.yaml").read_text())["applications"]
    module, _, name = app["import_path"].partition(":")
    assert (module, name) == ("common.cluster", "build_app")
    arguments = AppArguments.model_validate(app["args"])
    load_profile(arguments.profile)
    assert "max_num_requests" in load_run(arguments.run, arguments.set).model_fields_set


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"profile": "cpu"}, "run: Field required; build_app takes profile, run, set, "),
        ({"profile": "cpu", "run": "demo", "replicas": 2}, "replicas: Extra inputs are not permitted"),
        ({"profile": "cpu", "run": "demo", "min_replicas": "3"}, "^args: min_replicas 3 is more than max_replicas 1"),
    ],
)
def test_wrong_arguments_of_an_application_are_a_sentence(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _arguments(args)


def test_one_setting_may_be_given_as_a_text() -> None:
    assert _arguments({"profile": "cpu", "run": "demo", "set": "max_num_requests=8"}).set == ("max_num_requests=8",)


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed: its absence cannot be shown")
def test_without_ray_a_sentence_says_what_to_install() -> None:
    from common.cluster import build_app

    with pytest.raises(ConfigError, match=r"pip install -e '.\[ray\]'"):
        build_app({"profile": "cpu", "run": "demo"})
