"""Programs that tests start, with this checkout on their path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: object, timeout: float = 300, env: dict[str, str] | None = None, **options: Any) -> Any:
    """Run Python with these arguments, and return the CompletedProcess with what it said. env: added to this
    process's. options: as of `subprocess.run`."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, **(env or {})}
    options = {"cwd": ROOT, "capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, timeout=timeout, **options)


def interpreted_by_triton(*files: str | Path) -> None:
    """Run these files' tests in a process in which Triton interprets: it does or compiles for a whole process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this is the interpreter's process")
    triton = pytest.importorskip("triton", reason="the kernels need Triton")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("Triton's interpreter before 3.7 cannot loop under numpy 2.4")
    run = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, env={"TRITON_INTERPRET": "1"}, timeout=None)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]


def lopa(*arguments: object, **options: Any) -> Any:
    """Run the command."""
    return python("-m", "common.commands", *arguments, **options)
