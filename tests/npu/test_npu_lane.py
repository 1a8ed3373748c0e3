"""Without torch_npu, with the wrong one, without CANN, without devices: one sentence each, with the fix."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import MissingCapability
from lopa_ascend.ops import AttentionForm, npu, npu_ops, open_device, reference_ops, require_devices

ROOT = Path(__file__).parents[2]


def pretend(monkeypatch: pytest.MonkeyPatch, release: str, module: Any) -> None:
    """`module`: what importing torch_npu gives, or the error that it raises."""

    def import_module(_: str) -> Any:
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(npu, "version", lambda _: release)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(npu, "import_module", import_module)


def with_devices(count: int) -> SimpleNamespace:
    devices = {"is_available": lambda: count > 0, "device_count": lambda: count, "config": SimpleNamespace()}
    return SimpleNamespace(npu=SimpleNamespace(**devices))


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(npu, "version", version)
    with pytest.raises(MissingCapability, match=r"not installed: run `pip install -e '\.\[ascend\]'`"):
        npu_ops()


def test_another_release_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "9.2.3.post4", SimpleNamespace())
    with pytest.raises(
        MissingCapability, match=r"npu 9\.2\.3\.post4 are different releases: pip install torch==9\.2\.3 --index-url"
    ):
        npu_ops()


@pytest.mark.parametrize(
    ("release", "is_refused"),
    [
        ("2.7.1.post2", True), ("2.9.0", True), ("2.9.0.post1", True), ("2.9.0rc1", True), ("2.²", True),
        ("2.9.0.post2", False), ("2.9.1", False), ("2.10.0.post4", False), ("2.13.0", False),
    ],
)  # fmt: skip
def test_a_release_before_plain_pages(monkeypatch: pytest.MonkeyPatch, release: str, is_refused: bool) -> None:
    monkeypatch.setattr(torch, "__version__", release.split(".post")[0].split("rc")[0] + "+cpu")
    pretend(monkeypatch, release, with_devices(1))
    if not is_refused:
        assert require_devices(1)
        return
    with pytest.raises(MissingCapability, match=r"before 2\.9\.0\.post2: install torch-npu 2\.10\.0\.post4 with CANN"):
        npu_ops()


def test_a_cuda_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.__version__, with_devices(1))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        MissingCapability,
        match=r"is a CUDA build.*pip install torch==.* --index-url https://download.pytorch.org/whl/cpu",
    ):
        npu_ops()


@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
def test_no_cann(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    pretend(monkeypatch, torch.__version__, kind("libhccl.so: cannot open shared object file\nlong story"))
    with pytest.raises(MissingCapability, match=r"cannot load CANN \(libhccl.so: cannot open shared object file\)"):
        npu_ops()


def test_a_container_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is no part of CANN."""
    pretend(monkeypatch, torch.__version__, ImportError("libascend_hal.so: cannot open shared object file"))
    with pytest.raises(
        MissingCapability, match=r"libascend_hal.so.*the driver's: mount .*/usr/local/Ascend/driver"
    ) as e:
        npu_ops()
    assert "install CANN" not in str(e.value)


def test_cann_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.__version__, ImportError("libtorch_npu.so: undefined symbol: MsprofSysCycleTime"))
    with pytest.raises(MissingCapability, match=r"undefined symbol.* another release than this torch-npu was made for"):
        npu_ops()


def test_cann_but_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.__version__, with_devices(0))
    with pytest.raises(MissingCapability, match="no Ascend device is visible"):
        npu_ops()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("1,0", ", give ASCEND_RT_VISIBLE_DEVICES, which is '1,0', ascending numbers with commas between, and that"),
        ("0,0", "ascending numbers"),
        ("0-3", "ascending numbers"),
        ("4,5", "which is '4,5': a container counts its own devices from 0, and that"),
        (None, "check `npu-smi info`, and that /dev/davinci* are there and open to this user"),
    ],
)
def test_devices_that_a_variable_hides(monkeypatch: pytest.MonkeyPatch, given: str | None, told: str) -> None:
    pretend(monkeypatch, torch.__version__, with_devices(0))
    if given is None:
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", given)
    with pytest.raises(MissingCapability, match=re.escape(told)):
        npu_ops()


def test_a_device_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """CANN starts with the first device that is opened, and says then what it lacks."""

    def set_device(index: int) -> None:
        raise RuntimeError(
            "SetPrecisionMode:build/compiler_depend.ts:155 NPU function error: AclSetCompileopt, error code is 500001\n"
            "[Error]: The internal ACL of the system is incorrect.\n"
            "EC0010: [PID: 1] 2025-08-05-08:05:26.1 Failed to import Python module [No module named 'decorator']."
        )

    module = with_devices(2)
    module.npu.set_device = set_device
    pretend(monkeypatch, torch.__version__, module)
    told = r"npu 1 cannot be opened \(EC0010: Failed to import Python module \[No module named 'decorator'\]\. \(Set"
    with pytest.raises(MissingCapability, match=told):
        open_device(2, 1)


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.__version__, with_devices(8))
    require_devices(8)
    with pytest.raises(MissingCapability, match="needs 16 Ascend devices on this node and 8 are visible"):
        require_devices(16)


def test_a_release_without_the_attention_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    without_v2 = with_devices(1)
    without_v2.npu_fused_infer_attention_score = None
    pretend(monkeypatch, torch.__version__, without_v2)
    assert npu_ops().attention == AttentionForm(version=1, view_dims=3)
    with pytest.raises(MissingCapability, match="has no npu_fused_infer_attention_score_v2"):
        npu_ops(AttentionForm(version=2))


def as_user(tmp_path: Path, num_devices: str, *folders: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of each command, with these folders first on the path and no torch_npu after them."""
    (tmp_path / "run.yaml").write_text("model: absent\ninput: {path: absent.jsonl}\noutput: {path: o.jsonl}\n")
    paths = os.pathsep.join(map(str, [*folders, ROOT, ROOT / "tests" / "npu"]))
    # The commands share a process, in which torch has been loaded when the second of them applies the profile's own.
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "OMP_PROC_BIND": "false"}
    command = [sys.executable, str(ROOT / "tests" / "npu" / "as_user.py"), str(tmp_path), num_devices]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 4
    return results


def assert_one_sentence_each(results: dict[str, tuple[int, str]], sentence: str) -> None:
    """The device is missing before the model is, and before there are too few processes."""
    for command, (code, output) in results.items():
        assert code == 2, (command, output)
        assert "Traceback" not in output
        if "doctor" in command:
            assert " ".join(output.replace("│", " ").split()).count(sentence) == 1, output
        else:
            assert re.fullmatch(rf"lopa: .*{re.escape(sentence)}.*\n", output), output


def has_torch_npu() -> bool:
    """Whether this environment itself has it, not only the path."""
    code = "from importlib.metadata import version; version('torch-npu')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(has_torch_npu(), reason="torch-npu is installed")
def test_users_without_torch_npu(tmp_path: Path) -> None:
    assert_one_sentence_each(as_user(tmp_path, "none"), "torch-npu is not installed: run `pip install -e '.[ascend]'`")


@pytest.mark.slow
def test_users_with_another_release_than_torch(tmp_path: Path) -> None:
    metadata = tmp_path / "torch_npu-9.2.3.post4.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 9.2.3.post4\n")
    sentence = "and torch-npu 9.2.3.post4 are different releases: pip install torch==9.2.3"
    assert_one_sentence_each(as_user(tmp_path, "none", tmp_path), sentence)


NO_DEVICE = "CANN is installed but no Ascend device is visible: check `npu-smi info`"


@pytest.mark.sim
@pytest.mark.slow  # without the wheel: tests/engine/test_ascend_machines.py
@pytest.mark.parametrize(
    ("num_devices", "sentence"),
    [
        ("none", "torch-npu cannot load CANN (libhccl.so"),
        ("0", NO_DEVICE),
        ("8", "the profile needs 16 Ascend devices on this node and 8 are visible"),
    ],
    ids=["torch_npu without CANN", "CANN without a device", "too few devices"],
)
def test_users_with_the_real_wheel(torch_npu: Any, tmp_path: Path, num_devices: str, sentence: str) -> None:
    site = Path(torch_npu.__file__).parents[1]
    results = as_user(tmp_path, num_devices, site)
    if num_devices == "8":
        del results["lopa doctor --selftest"]  # which only needs one
    assert_one_sentence_each(results, sentence)


@pytest.mark.slow
def test_the_reference_lane_never_imports_torch_npu() -> None:
    code = (
        "import sys; from lopa_ascend.ops import reference_ops; reference_ops(); assert 'torch_npu' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_both_lanes_are_one_facade() -> None:
    assert type(reference_ops()) is type(reference_ops(attention=AttentionForm(2, 4)))
    assert type(reference_ops()).__module__ == "lopa_ascend.ops.facade"
