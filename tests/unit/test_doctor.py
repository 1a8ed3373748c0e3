"""`lopa doctor` says whether a profile can run here, on a machine that has no accelerator."""

from __future__ import annotations

import pytest

from common import doctor
from common.config import DeviceProfile, MeshConfig


def test_a_cpu_profile_can_run_and_the_report_names_torch(capsys: pytest.CaptureFixture[str]) -> None:
    profile = DeviceProfile(name="two", engine="lopa_cuda", device="cpu", mesh=MeshConfig(branch_parallel_size=2))
    assert doctor.examine(profile) == 0
    printed = capsys.readouterr().out
    assert "profile two: can run here" in printed
    assert "torch" in printed and "gloo" in printed


@pytest.mark.parametrize(("engine", "device"), [("lopa_cuda", "cuda"), ("lopa_ascend", "npu")])
def test_a_profile_without_its_devices_cannot_run(
    engine: str, device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "num_visible_devices", lambda kind: 0)
    profile = DeviceProfile.model_validate({"name": "far", "engine": engine, "device": device, "environment": {"A": 1}})
    monkeypatch.setenv("A", "2")
    assert doctor.examine(profile) == 2
    printed = capsys.readouterr().out
    assert f"1 {device} wanted on each node, 0 visible" in printed
    assert "cannot run here" in printed
    assert "A is '2' here, the profile has '1': yours is kept" in printed


def test_torch_npu_must_be_of_torchs_release(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "torch-npu": "2.12.0.post1"}
    monkeypatch.setattr(doctor, "_package", versions.get)
    profile = DeviceProfile(name="p", engine="lopa_ascend", device="npu")
    judged = {finding.subject: finding for finding in doctor.requirements(profile)}
    assert judged["versions"].is_ok is False
    assert "must be the same release" in judged["versions"].detail
    versions["torch-npu"] = "2.13.0.post4"
    judged = {finding.subject: finding for finding in doctor.requirements(profile)}
    assert judged["versions"].is_ok is True
