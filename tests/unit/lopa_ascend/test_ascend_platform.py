"""What `lopa doctor` says of a node before anything runs on it: CANN's folder, the driver, HCCL's ports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.config import DeviceProfile
from graphs.hccl import told_of_ports
from lopa_ascend import platforms
from lopa_ascend.platforms import Npu

ROOT = Path(__file__).parents[3]


def findings(num_processes: int = 1, mode: str = "npugraph") -> dict[str, tuple[str, bool | None]]:
    given: dict[str, Any] = {"name": "p", "engine": "lopa_ascend", "device": "npu", "graph": {"mode": mode}}
    profile = DeviceProfile.model_validate(given)
    found = Npu().requirements(profile, num_processes, num_processes)
    return {finding.subject: (finding.detail, finding.is_ok) for finding in found}


@pytest.mark.parametrize("version", ["25.2.0", "24.1.rc2", "25.5.0"])
def test_an_old_driver_is_told_where_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    (tmp_path / "version.info").write_text(f"Version={version}\nascendhal_version=7.35.23\n")
    monkeypatch.setattr(platforms, "_NPU_DRIVER", tmp_path / "version.info")
    detail, is_ok = findings()["NPU driver"]
    assert "install HDK 25.5.1 or later" in detail and is_ok is None, "such a node can run"
    assert "NPU driver" not in findings(mode="eager")


@pytest.mark.parametrize("text", ["Version=25.5.1\n", "Version=25.10.0\n", "Version=26.0.0\n", "no number\n", ""])
def test_other_drivers_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "version.info").write_text(text)
    monkeypatch.setattr(platforms, "_NPU_DRIVER", tmp_path / "version.info")
    assert "NPU driver" not in findings()


def test_cann_is_found_where_it_lies_since_8_5(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert platforms._CANN_FOLDERS[0] == "/usr/local/Ascend/cann"
    monkeypatch.setattr(platforms, "_CANN_FOLDERS", (str(tmp_path),))
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    folder = tmp_path / f"{platforms.machine()}-linux"
    folder.mkdir()
    (folder / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\n")
    assert findings()["CANN"][0].startswith("version=9.1.0 (")


def test_what_cann_s_own_python_imports_comes_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """sympy comes with torch."""
    _, _, after = (ROOT / "pyproject.toml").read_text().partition("\nascend = [")
    extra = re.findall(r'"([a-z0-9-]+)', after.partition("\n]")[0])
    assert set(platforms._OF_CANN) - {"sympy"} <= set(extra)
    monkeypatch.setattr(platforms, "_package", lambda name: None if name in ("decorator", "scipy") else "1.0")
    detail, is_ok = findings()["CANN's Python"]
    assert detail.startswith("imports decorator, scipy, not installed: pip install -e") and is_ok is None
    monkeypatch.setattr(platforms, "_package", lambda name: "1.0")
    assert "CANN's Python" not in findings()


def kernel(folder: Path, given_out: str, reserved: str) -> Path:
    (folder / "ip_local_port_range").write_text(f"{given_out}\n")
    (folder / "ip_local_reserved_ports").write_text(f"{reserved}\n")
    return folder


USUAL = "32768\t60999"


@pytest.mark.parametrize(
    ("given_out", "reserved", "environment", "told"),
    [
        (USUAL, "", {}, "=60000-60031"),
        (USUAL, "60000-60015", {}, "=60000-60015,60000-60031"),
        (USUAL, "8080,60000-60031", {}, None),
        (USUAL, "", {"HCCL_IF_BASE_PORT": "50000"}, "=50000-50031"),
        (USUAL, "", {"HCCL_IF_BASE_PORT": "20000"}, None),
        (USUAL, "", {"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, None),
        ("32768 59999", "", {}, None),
        ("", "", {}, None),
    ],
)
def test_ports_of_hccl_that_the_system_gives_to_others(
    tmp_path: Path, given_out: str, reserved: str, environment: dict[str, str], told: str | None
) -> None:
    found = told_of_ports(environment, kernel(tmp_path, given_out, reserved))
    assert found is None or "set HCCL_IF_BASE_PORT to 32736 or less, or as root" in found
    assert found is None if told is None else found is not None and found.endswith(f"ip_local_reserved_ports{told}")


def test_ports_matter_where_there_are_several_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platforms, "_IP_SETTINGS", kernel(tmp_path, USUAL, ""))
    assert findings(num_processes=16)["ports"][1] is None
    assert "ports" not in findings(num_processes=1)
    assert told_of_ports({}, tmp_path / "absent") is None


def test_a_user_without_a_line_in_passwd_is_told_to_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms.os, "getuid", lambda: 987654321)
    detail, is_ok = findings(num_processes=4)["user"]
    assert detail.startswith("987654321 has no line in /etc/passwd, which HCCL wants") and is_ok is None
    assert "user" not in findings(num_processes=1)
    monkeypatch.setattr(platforms.os, "getuid", lambda: 0)
    assert "user" not in findings(num_processes=4)
