"""Which algorithm HCCL took, by its own log: it says so where the variable below asks for it."""

from __future__ import annotations

import os
import re
from pathlib import Path

LOG_LEVEL = "ASCEND_MODULE_LOG_LEVEL=HCCL=1"
_CHOICE = re.compile(r"allreduce SelectAlg.* algName \[(\w+)\]", re.IGNORECASE)


def algorithm_of_sums() -> str | None:
    """Return the algorithm of this process's last all-reduce, as SelectAlgfor91093 logs it; None where the log has no
    such line."""
    folder = Path(os.environ.get("ASCEND_PROCESS_LOG_PATH") or Path.home() / "ascend" / "log")
    files = sorted(folder.glob(f"*/plog/plog-{os.getpid()}_*.log"))
    chosen = [name for path in files for name in _CHOICE.findall(path.read_text(encoding="utf-8", errors="replace"))]
    return chosen[-1] if chosen else None
