"""What a process says where its log stands on a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from started import python

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")


@FULL
@pytest.mark.parametrize(("command", "code"), [(["run", "nothing.yaml"], 2), (["evaluate", "nothing.yaml"], 2)])
def test_a_full_disk_hides_no_exit_code(command: list[str], code: int) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "common.commands", *command],
            stderr=full,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            timeout=120,
        )
    assert done.returncode == code


@FULL
def test_a_result_that_a_full_disk_has_lost_is_no_success() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "common.commands", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (2, "lopa: [Errno 28] No space left on device\n")


@FULL
def test_a_line_that_cannot_be_logged_is_lost_without_a_traceback() -> None:
    script = (
        "import logging\n"
        "from common.processes import log_to_stderr\n"
        "log_to_stderr()\n"
        "logging.root.handlers[0].setStream(open('/dev/full', 'w', buffering=1))\n"
        "logging.warning('lost')\n"
    )
    done = python("-c", script, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
