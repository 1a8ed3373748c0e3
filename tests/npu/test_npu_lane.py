"""Without torch_npu, with the wrong one, without CANN, without devices: one sentence each, with the fix."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.engine import MissingCapability
from lopa_ascend.ops import npu, npu_ops, reference_ops, require_devices


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
    with pytest.raises(MissingCapability, match=r"not installed: run `pip install 'lopa\[ascend\]'`"):
        npu_ops()


def test_another_release_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "1.2.3.post4", SimpleNamespace())
    with pytest.raises(
        MissingCapability, match=r"torch-npu 1\.2\.3\.post4 are different releases: install torch==1\.2\.3"
    ):
        npu_ops()


def test_a_cuda_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.__version__, with_devices(1))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(MissingCapability, match=r"is a CUDA build.*install the CPU build of torch"):
        npu_ops()


@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
def test_no_cann(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    pretend(monkeypatch, torch.__version__, kind("libhccl.so: cannot open shared object file\nlong story"))
    with pytest.raises(MissingCapability, match=r"cannot load CANN \(libhccl.so: cannot open shared object file\)"):
        npu_ops()


def test_cann_but_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.__version__, with_devices(0))
    with pytest.raises(MissingCapability, match="no Ascend device is visible"):
        npu_ops()


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.__version__, with_devices(8))
    require_devices(8)
    with pytest.raises(MissingCapability, match="needs 16 Ascend devices on this node and 8 are visible"):
        require_devices(16)


def test_a_release_without_the_attention_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    without_v2 = with_devices(1)
    without_v2.npu_fused_infer_attention_score = None
    pretend(monkeypatch, torch.__version__, without_v2)
    assert npu_ops(attention_version=1).attention_version == 1
    with pytest.raises(MissingCapability, match="has no npu_fused_infer_attention_score_v2"):
        npu_ops(attention_version=2)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("load", "sentence"),
    [
        ("pass", "torch-npu cannot load CANN (libhccl.so"),
        ("from sim import runtime; runtime.load()", "no Ascend device is visible"),
    ],
    ids=["torch_npu without CANN", "CANN without a device"],
)
def test_the_real_wheel(torch_npu: Any, load: str, sentence: str) -> None:
    """The sentences above, from torch_npu itself."""
    code = f"import sys; sys.path.insert(0, 'tests/npu'); {load}; from lopa_ascend.ops import npu_ops; npu_ops()"
    environment = {**os.environ, "LOPA_SIM_DEVICES": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert re.search(rf"MissingCapability: .*{re.escape(sentence)}", done.stderr)


def test_the_reference_lane_never_imports_torch_npu() -> None:
    code = (
        "import sys; from lopa_ascend.ops import reference_ops; reference_ops(); assert 'torch_npu' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_both_lanes_are_one_facade() -> None:
    assert type(reference_ops()) is type(reference_ops(attention_version=1))
    assert type(reference_ops()).__module__ == "lopa_ascend.ops.facade"
