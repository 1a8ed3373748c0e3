"""How a process ends on a signal: while it works, and while it is ending anyway."""

from __future__ import annotations

import signal
import subprocess
import sys

PREPARE = """
import os, signal, sys, time, weakref
from common.processes.stop import Stopped, end_undisturbed, stop_on_signals
stop_on_signals(grace_s=GRACE_S)
class Thing: pass
thing = Thing()
weakref.finalize(thing, os.kill, os.getpid(), signal.SIGTERM)  # the signal comes in the middle of the interpreter's end
"""


def run(code: str, grace_s: int = 300) -> tuple[int, str]:
    prepared = PREPARE.replace("GRACE_S", str(grace_s)) + code
    ended = subprocess.run([sys.executable, "-c", prepared], capture_output=True, text=True, timeout=240)
    return ended.returncode, ended.stderr


def test_a_signal_ends_what_works() -> None:
    code = "try:\n    os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)\nexcept Stopped as stopped:\n"
    assert run(code + "    sys.exit(str(stopped))") == (1, "stopped by SIGTERM\n")


def test_a_signal_changes_nothing_of_an_end_that_has_begun() -> None:
    assert "Traceback" in run("sys.exit(2)")[1]
    assert run("end_undisturbed()\nsys.exit(2)") == (2, "")


def test_a_process_that_hangs_on_its_way_out_is_ended() -> None:
    code = "end_undisturbed()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(600)"
    assert run(code, grace_s=1)[0] == 128 + signal.SIGTERM
