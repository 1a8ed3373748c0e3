"""Decide whether torch_npu can be simulated here, and load it once for this process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from sim import stubs

# Releases of torch-npu by that of torch: the wheels whose operators the twins describe, the one to install first.
RELEASES = {"2.10.0": ("2.10.0.post4", "2.10.0.post6", "2.10.0.post7"), "2.13.0": ("2.13.0",)}
NUM_DEVICES = 16  # one Atlas A3 node
_BUILDS = Path(__file__).parents[3] / "build" / "npu-stubs"


def why_not() -> str | None:
    """Why the simulated NPU is not available; None if it is."""
    wanted = releases_here()
    if not wanted:
        return f"torch is {version('torch')}, the simulated NPU describes {' and '.join(RELEASES)}"
    try:
        found = version("torch-npu")
    except PackageNotFoundError:
        return "torch-npu is not installed (tests/npu/run_sim.py installs it)"
    if found not in wanted:
        return f"torch-npu is {found}, the simulated NPU describes {', '.join(wanted)}"
    if _is_cuda_build():
        return f"torch {version('torch')} is a CUDA build, in which torch-npu ends the process: install the CPU build"
    if "torch_npu" not in sys.modules and _has_cann():
        return "CANN is installed: use the tests marked npu"
    missing = stubs.missing_tools()
    if missing:
        return f"{', '.join(missing)} not found: the stub libraries cannot be built"
    return None


def releases_here() -> tuple[str, ...]:
    """Releases of the torch-npu that belongs to this environment's torch; none if that is not described."""
    return RELEASES.get(version("torch").split("+")[0], ())


def build_stubs() -> Path:
    """The stub libraries of this wheel and Python; built on first use."""
    folder = _BUILDS / _fingerprint()
    if not folder.exists():
        stubs.build(_package("torch_npu"), _package("torch"), folder)
    return folder


@cache
def load() -> ModuleType:
    """torch_npu, imported on the stub libraries with NUM_DEVICES devices."""
    os.environ.setdefault("LOPA_SIM_DEVICES", str(NUM_DEVICES))
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # Libraries that are already loaded satisfy the wheel's needs by soname: no LD_LIBRARY_PATH before Python starts.
    for library in stubs.libraries(build_stubs()):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch_npu

    return torch_npu


def _is_cuda_build() -> bool:
    return (_package("torch") / "lib" / "libtorch_cuda.so").exists()


def _has_cann() -> bool:
    try:
        ctypes.CDLL(stubs.HOLDER)
    except OSError:
        return False
    return True


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _fingerprint() -> str:
    sources = (Path(stubs.__file__), stubs.CANN_CPP)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(f"{sys.implementation.cache_tag} {version('torch')} {version('torch-npu')}".encode())
    return digest.hexdigest()[:16]
