"""Shared by all tests: the golden models, a small profile, and reasons for skipping device tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from common.user_files import user_folder

# The loops' machine code is the user's, whatever HOME a test gives its processes. Imports below read this.
os.environ.setdefault("LOPA_LOOPS_FOLDER", str(user_folder("LOPA_LOOPS_FOLDER", "loops")))

import pytest
import torch

from common.config import DeviceProfile
from common.decoding.scheduling.warm import warm_up
from common.scoring.programs import run as programs
from common.scoring.programs.isolation import SWITCH

# The models here are too small to share, and threads that wait for each other are slow on a busy machine.
torch.set_num_threads(1)

# Programs that are to end well get the time that a busy machine takes for them, those that are tried while tests are
# collected too.
programs.TIME_LIMIT_S = programs.START_LIMIT_S = 20.0

# These programs are known, but for the hostile ones, which are not run without namespaces.
os.environ.setdefault(SWITCH, "1")

with suppress(ImportError):  # only tests that draw examples need it
    from hypothesis import HealthCheck, settings

    # How long an example takes, drawn or tried, is the machine's affair.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Have the loops compiled before workers and the processes that tests start ask for them, all at once."""
    if not hasattr(config, "workerinput"):
        warm_up()


GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = os.environ.get("LOPA_SLOW", "")
    number, num_shares = map(int, slow.split("/")) if "/" in slow else (1, 1)  # 2/4: of the second quarter of all files
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is visible"))
        if "slow" in item.keywords and not slow:
            reason = "others show it in part, or it takes minutes: set LOPA_SLOW=1"
            item.add_marker(pytest.mark.skip(reason=reason))
        if "slow" in item.keywords and crc32(item.location[0].encode()) % num_shares != number - 1:
            item.add_marker(pytest.mark.skip(reason=f"of another share of the slow tests than LOPA_SLOW={slow}"))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at thousands of tests again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line a reason, where -rs has one a place."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[-1]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} skipped: {reason}")


@pytest.fixture
def cpu() -> DeviceProfile:
    return DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=512)
