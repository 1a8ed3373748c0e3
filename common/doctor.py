"""`lopa doctor`: what this machine has, and whether a profile can run on it, before anyone waits for a model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.config import ConfigError, DeviceProfile
from common.engine import MissingCapability
from common.job import Nodes, processes_here
from common.launch import num_visible_devices, require_devices, resolve_mesh
from common.metrics import fingerprint

_CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")
_CANN_VERSION_FILES = ("version.cfg", "aarch64-linux/ascend_toolkit_install.info", "opp/version.info")
_NPU_DRIVER = Path("/usr/local/Ascend/driver/version.info")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `is_ok` None: nothing to judge, it is just said."""

    subject: str
    detail: str
    is_ok: bool | None = None


def examine(profile: DeviceProfile | None) -> int:
    """Print the report; 0 if the profile (if there is one) can run here, else 2."""
    _print("this machine", list(machine()))
    if profile is None:
        return 0
    needs = list(requirements(profile))
    can_run = all(need.is_ok is not False for need in needs)
    _print(f"profile {profile.name}: {'can run here' if can_run else 'cannot run here'}", needs)
    return 0 if can_run else 2


def run_selftest(profile: DeviceProfile | None) -> int:
    """Compute every operation on the device beside its CPU twin; 0 if all agree, else 2. Raises ConfigError."""
    if profile is None or profile.device != "npu":
        raise ConfigError("--selftest is for profiles of device npu: add --profile ascend_910c_tp4_bp4")
    found = import_module("lopa_ascend.selftest").examine_alone(profile)
    findings = [Finding(finding.name, finding.detail, finding.is_right) for finding in found]
    is_right = all(finding.is_ok for finding in findings)
    _print(f"self-test: {'every operation is right' if is_right else 'do not serve with this CANN'}", findings)
    return 0 if is_right else 2


def machine() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    about = fingerprint()
    yield Finding("python", f"{about['python']} ({sys.executable})")
    yield Finding("lopa", f"{about['lopa']}, commit {about['commit'] or 'unknown (not a git checkout)'}")
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'no'}")
    yield Finding("cpu", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    for device in ("cuda", "npu"):
        yield Finding(f"{device} devices", f"{num_visible_devices(device)} visible{_visibility(device)}")
    yield from (Finding("nvidia", line) for line in _nvidia())
    yield Finding("CANN", _cann() or "not found")
    yield Finding("NPU driver", _first_version(_NPU_DRIVER) or "not found")
    for package in ("torch-npu", "triton", "transformers", "tokenizers", "safetensors", "numpy"):
        yield Finding(package, _package(package) or "not installed")
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "hccl": _has_npu_package()}
    yield Finding("collectives", ", ".join(name for name, here in backends.items() if here) or "none")


def requirements(profile: DeviceProfile) -> Iterator[Finding]:
    """What the profile needs, each judged."""
    mesh, here = resolve_mesh(profile), _processes_here(profile)
    sizes = f"dp {mesh.data_parallel_size} x bp {mesh.branch_parallel_size} x tp {mesh.tensor_parallel_size}"
    yield Finding("processes", f"{mesh.num_processes} ({sizes}), {here} on each node")
    if profile.device == "cpu":
        yield Finding("device", "cpu", True)
    else:
        visible = num_visible_devices(profile.device)
        yield Finding("devices", f"{here} {profile.device} wanted on each node, {visible} visible", visible >= here)
    yield from {"cpu": _cpu_needs, "cuda": _cuda_needs, "npu": _npu_needs}[profile.device](profile)
    for name, value in profile.environment.items():
        if os.environ.get(name, value) != value:
            yield Finding(
                "environment", f"{name} is {os.environ[name]!r} here, the profile has {value!r}: yours is kept"
            )


def _cpu_needs(profile: DeviceProfile) -> Iterator[Finding]:
    import torch.distributed as dist

    if resolve_mesh(profile).num_processes > 1:
        yield Finding("collectives", "gloo", dist.is_gloo_available())


def _cuda_needs(profile: DeviceProfile) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    yield Finding("torch with CUDA", torch.version.cuda or "this torch is built without it", bool(torch.version.cuda))
    if resolve_mesh(profile).num_processes > 1:
        yield Finding("collectives", "nccl", dist.is_nccl_available())
    if profile.kernels == "triton":
        yield Finding("triton", _package("triton") or "not installed: pip install -e '.[cuda]'", _has("triton"))


def _npu_needs(profile: DeviceProfile) -> Iterator[Finding]:
    torch_version, npu_version = _package("torch") or "", _package("torch-npu")
    yield Finding("torch_npu", npu_version or "not installed: pip install -e '.[ascend]'", npu_version is not None)
    if npu_version is not None:
        is_match = _release(torch_version) == _release(npu_version)
        fix = "the same release" if is_match else "must be the same release: pip install -e '.[ascend]'"
        yield Finding("versions", f"torch {torch_version}, torch_npu {npu_version}: {fix}", is_match)
    cann, reason = _cann(), _why_no_devices(profile)
    fix = "not found: install the toolkit, or source /usr/local/Ascend/ascend-toolkit/set_env.sh"
    # Where torch-npu loads it, CANN is there, whatever folder holds its version.
    yield Finding("CANN", cann or fix if reason else cann or "loaded", cann is not None or reason is None)
    yield Finding("start", reason or "torch-npu loads, and its devices answer", reason is None)
    if profile.graph.mode == "torchair" and not profile.enforce_eager:
        protobuf = _package("protobuf")
        detail = "comes with torch_npu, and needs protobuf"
        fix = f"{detail}, which is not installed: pip install -e '.[ascend]'"
        yield Finding("torchair", f"{detail}: {protobuf}" if protobuf else fix, protobuf is not None)


def _why_no_devices(profile: DeviceProfile) -> str | None:
    """What a run of this profile would end with."""
    try:
        require_devices(profile, _processes_here(profile))
    except MissingCapability as error:
        return str(error)
    return None


def _processes_here(profile: DeviceProfile) -> int:
    """On each of as many nodes as the profile's own numbers make."""
    here = profile.processes_per_node or resolve_mesh(profile).num_processes
    return processes_here(profile, Nodes(count=max(1, resolve_mesh(profile).num_processes // here)))


def _nvidia() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ["no nvidia-smi"]
    query = [command, "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer: {error}"]
    return result.stdout.strip().splitlines() or [f"nvidia-smi: {result.stderr.strip() or 'no device'}"]


def _visibility(device: str) -> str:
    name = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}[device]
    return f" ({name}={os.environ[name]})" if name in os.environ else ""


def _cann() -> str | None:
    folders = [os.environ.get("ASCEND_TOOLKIT_HOME", ""), *_CANN_FOLDERS]
    paths = [Path(folder) / name for folder in folders if folder for name in _CANN_VERSION_FILES]
    return next((version for path in paths if (version := _first_version(path))), None)


def _first_version(path: Path) -> str | None:
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = next((line for line in lines if "version" in line.lower()), None)
    return f"{found.strip()} ({path})" if found else str(path)


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[str, ...]:
    """2.13.0.post4+cpu -> (2, 13, 0): torch_npu follows torch's releases with builds of its own."""
    return tuple(version.split("+")[0].split(".")[:3])


def _has(module: str) -> bool:
    return find_spec(module) is not None


def _has_npu_package() -> bool:
    return _package("torch-npu") is not None


def _print(title: str, findings: list[Finding]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    signs = {True: "[green]ok[/green]", False: "[red]missing[/red]", None: ""}
    for finding in findings:
        # .[ascend] is no markup.
        table.add_row(signs[finding.is_ok], finding.subject, escape(finding.detail))
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)
