"""`lopa doctor` says whether a profile can run here, on a machine that has no accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from common.commands import doctor
from common.config import DeviceProfile, MeshConfig
from common.errors import ConfigError
from common.platforms import Finding, platform_of_device
from lopa_ascend import platforms


def test_a_cpu_profile_can_run_and_the_report_names_torch(capsys: pytest.CaptureFixture[str]) -> None:
    profile = DeviceProfile(name="two", engine="lopa_cuda", device="cpu", mesh=MeshConfig(branch_parallel_size=2))
    assert doctor.examine(profile) == 0
    printed = capsys.readouterr().out
    assert "profile two: can run here" in printed
    assert "torch" in printed and "gloo" in printed


def test_the_name_of_a_profile_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.examine(DeviceProfile(name="[/x]\x1b[2J", engine="lopa_cuda", device="cpu")) == 0
    assert "profile [/x]\\x1b[2J: can run here" in capsys.readouterr().out


@pytest.mark.parametrize(("engine", "device"), [("lopa_cuda", "cuda"), ("lopa_ascend", "npu")])
def test_a_profile_without_its_devices_cannot_run(
    engine: str, device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform_of_device(device), "num_visible_devices", lambda: 0)
    profile = DeviceProfile.model_validate({"name": "far", "engine": engine, "device": device, "environment": {"A": 1}})
    monkeypatch.setenv("A", "2")
    assert doctor.examine(profile) == 2
    printed = capsys.readouterr().out
    assert f"1 {device} wanted on each node, 0 visible" in printed
    assert "cannot run here" in printed
    assert "A is '2' here, the profile has '1': yours is kept" in printed


def test_torch_npu_must_be_of_torchs_release(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "torch-npu": "2.12.0.post1"}
    monkeypatch.setattr(platforms, "_package", versions.get)
    profile = DeviceProfile(name="p", engine="lopa_ascend", device="npu")
    judged = {finding.subject: finding for finding in doctor.requirements(profile)}
    assert judged["versions"].is_ok is False
    assert "must be the same release" in judged["versions"].detail
    versions["torch-npu"] = "2.13.0.post4"
    judged = {finding.subject: finding for finding in doctor.requirements(profile)}
    assert judged["versions"].is_ok is True


def test_torchair_needs_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "torch-npu": "2.13.0"}
    monkeypatch.setattr(platforms, "_package", versions.get)
    profile = DeviceProfile.model_validate(
        {"name": "p", "engine": "lopa_ascend", "device": "npu", "graph": {"mode": "torchair"}}
    )
    (missing,) = [finding for finding in doctor.requirements(profile) if finding.subject == "torchair"]
    assert missing.is_ok is False and "pip install -e '.[ascend]'" in missing.detail
    versions["protobuf"] = "5.29.1"
    (found,) = [finding for finding in doctor.requirements(profile) if finding.subject == "torchair"]
    assert found.is_ok is True


@pytest.mark.parametrize("is_right", [True, False])
def test_the_self_test_is_a_table_and_an_exit_code(
    is_right: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        Finding("swiglu", "equal", True),
        Finding("static_quant", "wrong: off by 3 (not called by this model)", None),
        Finding("write_kv", "other KV than was written", is_right),
    ]
    monkeypatch.setattr(platform_of_device("npu"), "selftest", lambda profile, model: found)
    profile = DeviceProfile(name="p", engine="lopa_ascend", device="npu")
    assert doctor.run_selftest(profile) == (0 if is_right else 2)
    printed = capsys.readouterr().out
    assert ("no operation that is called is wrong" in printed) == is_right
    assert "other KV than was written" in printed


def test_the_self_test_needs_an_ascend_profile(cpu: DeviceProfile) -> None:
    with pytest.raises(ConfigError, match="--selftest is for profiles of device npu"):
        doctor.run_selftest(cpu)


def test_a_self_test_without_a_profile_is_refused_before_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--selftest is for profiles of device npu"):
        doctor.doctor(None, selftest=True)
    assert not capsys.readouterr().out


def test_the_platform_that_is_looked_at_is_the_profiles_own(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = MeshConfig(branch_parallel_size=2)
    profile = DeviceProfile(name="two", engine="lopa_ascend", device="cpu", mesh=mesh)
    assert doctor.examine(profile) == 0
    assert "gloo" in capsys.readouterr().out


def test_the_linears_of_a_model_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        doctor.doctor("cpu", model=str(Path(__file__).parents[3] / "models" / "demo"))
    assert "linears of decoder layers: 0 dynamic, 0 static, 40 float" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--model is looked at with a profile"):
        doctor.doctor(None, model="m")
