"""What a user reads who starts an Ascend profile on a machine that lacks something: one sentence, exit code 2.

A made-up torch-npu stands in for the ways in which the real one can be broken; like the real one it asks to be loaded
with torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "demo"
RELEASE = torch.__version__.split("+")[0]
NO_CANN = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")'
DEVICES = """
class npu:
    is_available = staticmethod(lambda: {count} > 0)
    device_count = staticmethod(lambda: {count})
npu_fused_infer_attention_score = None
def _autoload():
    raise RuntimeError("loaded with torch")
"""


def machine(folder: Path, *, torch_npu: str | None, release: str = RELEASE) -> dict[str, str]:
    """The environment of a process on it. torch_npu: source of the module, None where it is not installed."""
    site = folder / "site"
    site.mkdir()
    if torch_npu is not None:
        (site / "torch_npu.py").write_text(torch_npu)
        info = site / f"torch_npu-{release}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {release}\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    inherited = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return {**inherited, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


Done = subprocess.CompletedProcess[str]


def start(folder: Path, environment: dict[str, str], module: str, num_devices: int = 1) -> Done:
    profile = {
        "name": "ascend", "engine": "lopa_ascend", "device": "npu", "mesh": {"tensor_parallel_size": num_devices},
    }  # fmt: skip
    run = {
        "model": str(MODEL), "decode": {"window_attention": "block_causal"}, "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
    }  # fmt: skip
    (folder / "profile.yaml").write_text(yaml.safe_dump(profile))
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "in.jsonl").write_text('{"prompt": "hello"}\n')
    arguments = {
        "common.commands": ["run", "--profile", "profile.yaml", "run.yaml"],
        "common.commands.job": ["run", "profile.yaml", "run.yaml"],
    }
    command = [sys.executable, "-m", module, *arguments[module]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


BROKEN = {
    "mismatched": (DEVICES.format(count=1), "9.2.3", "9.2.3 are different releases: pip install torch==9.2.3"),
    "old": (DEVICES.format(count=1), "2.9.0.post1", "before 2.9.0.post2: install torch-npu 2.10.0.post4 with CANN"),
    "no CANN": (NO_CANN, RELEASE, "torch-npu cannot load CANN (libhccl.so: cannot open shared object file"),
    "no device": (DEVICES.format(count=0), RELEASE, "CANN is installed but no Ascend device is visible"),
}  # fmt: skip


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("mismatched", "old", "no CANN")]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["no device", *SLOW])
def test_one_sentence_and_exit_code_2(case: str, tmp_path: Path) -> None:
    torch_npu, release, sentence = BROKEN[case]
    done = start(tmp_path, machine(tmp_path, torch_npu=torch_npu, release=release), "common.commands")
    assert_one_sentence(done, sentence)


@pytest.mark.slow
def test_without_torch_npu(tmp_path: Path) -> None:
    try:
        version("torch-npu")
    except PackageNotFoundError:
        done = start(tmp_path, machine(tmp_path, torch_npu=None), "common.commands")
        assert_one_sentence(done, "torch-npu is not installed: run `pip install -e '.[ascend]'`")
    else:
        pytest.skip("torch-npu is installed here")


@pytest.mark.slow
def test_too_few_devices_are_noticed_before_any_process_is_started(tmp_path: Path) -> None:
    environment = machine(tmp_path, torch_npu=DEVICES.format(count=1))
    done = start(tmp_path, environment, "common.commands.job", num_devices=2)
    assert_one_sentence(done, "the profile needs 2 Ascend devices on this node and 1 are visible")


@pytest.mark.slow
def test_each_process_checks_the_devices_of_its_node_too(tmp_path: Path) -> None:
    environment = machine(tmp_path, torch_npu=DEVICES.format(count=1))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = start(tmp_path, {**environment, **rank}, "common.commands", num_devices=2)
    assert_one_sentence(done, "the profile needs 2 Ascend devices on this node and 1 are visible")


def assert_one_sentence(done: Done, sentence: str) -> None:
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if "Warning" not in line]
    assert len(told) == 1 and told[0].startswith("lopa: ") and sentence in told[0], done.stderr
