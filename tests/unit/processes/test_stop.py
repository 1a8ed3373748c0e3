"""How a process ends on a signal: while it works, and while it is ending anyway."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from started import python

PREPARE = """
import os, signal, sys, threading, time, weakref
from common.processes.stop import Stopped, end_undisturbed, stop_on_signals
stop_on_signals(grace_s=GRACE_S)
class Thing: pass
thing = Thing()
weakref.finalize(thing, os.kill, os.getpid(), signal.SIGTERM)  # the signal comes in the middle of the interpreter's end
"""


def run(code: str, grace_s: int = 300) -> tuple[int, str]:
    prepared = PREPARE.replace("GRACE_S", str(grace_s)) + code
    ended = python("-c", prepared, timeout=240)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_what_works(name: str) -> None:
    code = f"try:\n    os.kill(os.getpid(), signal.{name}); time.sleep(600)\nexcept Stopped as stopped:\n"
    assert run(code + "    sys.exit(str(stopped))") == (1, f"stopped by {name}\n")


def test_a_closed_terminal_is_ignored_where_nohup_has_it_so() -> None:
    code = "os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.1); sys.exit('goes on')"
    ended = subprocess.run(
        ["nohup", sys.executable, "-c", PREPARE.replace("GRACE_S", "300") + f"end_undisturbed()\n{code}"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 1 and ended.stderr.endswith("goes on\n")


def test_two_signals_at_once_are_one_stop() -> None:
    code = """
both = signal.SIGINT, signal.SIGTERM
try:
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for one in both:
        signal.pthread_kill(threading.get_ident(), one)  # to this thread: others do not block them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    time.sleep(600)
except Stopped as stopped:
    time.sleep(0.1)
    end_undisturbed()
    sys.exit(str(stopped))
"""
    assert run(code) == (1, "stopped by SIGINT\n")


def test_a_signal_changes_nothing_of_an_end_that_has_begun() -> None:
    assert run("end_undisturbed()\nsys.exit(2)") == (2, "")


def test_a_process_that_hangs_on_its_way_out_is_ended() -> None:
    code = "end_undisturbed()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(600)"
    assert run(code, grace_s=1)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("where", ["finalizer", "callback"])
def test_a_signal_where_python_ignores_errors_ends_what_works(where: str) -> None:
    """A callback of a weak reference comes at the end of an import too. Other errors there are told."""
    code = """
class Other:
    def __del__(self):
        raise ValueError("told of")
def stop(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    sum(range(1000))
class Last(Thing):
    __del__ = stop if WHERE == "finalizer" else None
other, last = Other(), Last() if WHERE == "finalizer" else Thing()
seen = weakref.ref(last, stop) if WHERE == "callback" else None
try:
    del other, last
    time.sleep(600)
except Stopped as stopped:
    end_undisturbed()
    sys.exit(str(stopped))
"""
    status, said = run(code.replace("WHERE", repr(where)))
    assert status == 1 and said.endswith("\nstopped by SIGTERM\n") and "ValueError: told of" in said
    assert "Stopped" not in said


@pytest.mark.parametrize(
    ("last", "exit_code"), [("end(2)", 2), ("sys.exit(2)", 1), ("raise ValueError('mine')", 1), ("", 1)]
)
def test_what_is_kept_until_the_end_is_never_freed(last: str, exit_code: int) -> None:
    """Freeing memory of a device that waits for ever would wait, too."""
    code = f"""
from common.processes.stop import end, keep_until_end
class Stuck:
    def __del__(self):
        print("freed", file=sys.stderr, flush=True)
def work():
    stuck = Stuck()
    keep_until_end(stuck)
work()
print("said", end="", file=sys.stderr)
{last}
"""
    ended = python("-c", "import sys" + code, timeout=240)
    assert ended.returncode == exit_code
    assert ended.stderr.startswith("said") and "freed" not in ended.stderr
    assert ("ValueError: mine" in ended.stderr) == ("mine" in last)
