#!/usr/bin/env python3
"""Prepare the simulated NPU and run its tests with this interpreter: `python tests/npu/run_sim.py [pytest arguments]`.

Installs the torch-npu wheel that belongs to this torch (2.13.0 or 2.10.0, in a CPU build) into build/, builds the stub
CANN libraries, runs the tests of tests/npu; nothing in the environment changes. `--torch 2.10.0` in front does so in an
environment of its own, build/venv-torch-2.10.0. Needs pip with access to an index, g++ and binutils. Exits with 2 where
something is missing: in CI this lane must not turn into skips unnoticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
sys.path.insert(0, str(TESTS))

from sim.runtime import build_stubs, releases_here, why_not  # noqa: E402

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    if sys.argv[1:2] == ["--torch"] and len(sys.argv) > 2:
        raise SystemExit(_run_with_torch(sys.argv[2], sys.argv[3:]))
    release = next(iter(releases_here()), None)
    site = ROOT / "build" / f"npu-site-{sys.implementation.cache_tag}-{release}"
    sys.path.insert(0, str(site))
    requirements = () if release is None else (f"torch-npu=={release}", "protobuf")  # torchair wants the second
    missing = [requirement for requirement in requirements if not _is_installed(requirement)]
    if missing:
        _install(missing, site)
    reason = why_not()
    if reason is not None:
        print(f"the simulated NPU cannot run: {reason}", file=sys.stderr)
        raise SystemExit(2)
    build_stubs()
    paths = os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    arguments = sys.argv[1:] or ["-q", str(TESTS)]
    # With CI set, torch takes an operator's `out` for an alias that must not be and refuses to compile it.
    environment.pop("CI", None)
    raise SystemExit(subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment, cwd=ROOT).returncode)


def _run_with_torch(release: str, arguments: list[str]) -> int:
    """This script in an environment with that CPU build of torch; made on first use."""
    environment = ROOT / "build" / f"venv-torch-{release}"
    python = str(environment / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet"]
    if not environment.exists():
        steps = [
            [sys.executable, "-m", "venv", str(environment)],
            [*install, f"torch=={release}+cpu", "--extra-index-url", CPU_BUILDS],
            [*install, "-e", f"{ROOT}[test]"],
        ]
        if any(subprocess.run(step).returncode for step in steps):
            shutil.rmtree(environment, ignore_errors=True)
            print(
                f"the simulated NPU cannot run: neither {CPU_BUILDS} nor pip's own index has torch {release}+cpu",
                file=sys.stderr,
            )
            return 2
    return subprocess.run([python, __file__, *arguments]).returncode


def _is_installed(requirement: str) -> bool:
    name, _, release = requirement.partition("==")
    try:
        found = version(name)
    except PackageNotFoundError:
        return False
    return found == release or not release


def _install(requirements: list[str], site: Path) -> None:
    """Without dependencies: torch and numpy are here already, and what else the wheel names is not needed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(site)]
    if subprocess.run([*command, *requirements]).returncode:
        print(f"the simulated NPU cannot run: {', '.join(requirements)} could not be installed", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
