#!/usr/bin/env python3
"""Prepare the simulated NPU and run its tests with this interpreter: `python tests/npu/run_sim.py [pytest arguments]`.

Installs the torch-npu wheel into build/ (nothing in the environment changes), builds the stub CANN libraries, runs the
tests of tests/npu. Needs torch 2.13.0, pip with access to an index, g++ and binutils. Exits with 2 where something is
missing: in CI this lane must not turn into skips unnoticed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
sys.path.insert(0, str(TESTS))

from sim.runtime import RELEASE, build_stubs, why_not  # noqa: E402

REQUIREMENTS = (f"torch-npu=={RELEASE}", "protobuf")  # torchair wants the second


def main() -> None:
    site = ROOT / "build" / f"npu-site-{sys.implementation.cache_tag}"
    sys.path.insert(0, str(site))
    missing = [requirement for requirement in REQUIREMENTS if not _is_installed(requirement)]
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


def _is_installed(requirement: str) -> bool:
    name, _, release = requirement.partition("==")
    try:
        return version(name).startswith(release)
    except PackageNotFoundError:
        return False


def _install(requirements: list[str], site: Path) -> None:
    """Without dependencies: torch and numpy are here already, and what else the wheel names is not needed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(site)]
    if subprocess.run([*command, *requirements]).returncode:
        print(f"the simulated NPU cannot run: {', '.join(requirements)} could not be installed", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
