"""Programs that tests start, with this checkout on their path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: object, timeout: float = 300, env: dict[str, str] | None = None, **options: Any) -> Any:
    """Run Python with these arguments, and return the CompletedProcess with what it said. env: added to this
    process's. options: as of `subprocess.run`."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, **(env or {})}
    options = {"cwd": ROOT, "capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, timeout=timeout, **options)


def lopa(*arguments: object, **options: Any) -> Any:
    """Run the command."""
    return python("-m", "common.commands", *arguments, **options)
