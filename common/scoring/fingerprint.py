"""Where numbers come from: versions and commit, for every result file."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

from common.policies import origins
from common.version import LOPA_VERSION, version_of

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "jinja2", "numpy")  # what tokens and texts depend on


def fingerprint() -> dict[str, Any]:
    """Return where the numbers come from, beside what the engine says about its device."""
    return {
        "lopa": LOPA_VERSION,
        "commit": _commit(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
        "policies": origins(),
        "platform": platform.platform(),
    }


def _commit(folder: Path) -> str | None:
    """Return the commit of the checkout that this package runs from, marked if files differ; None outside of a
    checkout."""
    described = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(described, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
