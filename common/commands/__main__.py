"""The beginning of `lopa` and `python -m common.commands`: signals end it in a sentence while the rest is imported."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once: there is nothing to close yet. Later `main` listens."""
    try:
        if (os.environ.get("RANK") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ) and sys.stderr is not None:
            print(f"lopa: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    finally:
        os._exit(128 + number)


for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, _end)

from common.commands.main import main  # noqa: E402

if __name__ == "__main__":
    main()
