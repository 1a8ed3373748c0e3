"""Programs run in namespaces, or by limits where that is allowed, and each does what it is for."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from started import python

from common.errors import ConfigError
from common.scoring import isolation, own_results
from common.scoring.programs import run as programs
from common.scoring.programs.cell import system_calls
from common.scoring.programs.isolation import MEANINGS, SWITCH, _chosen, program_scorer, why_not
from common.scoring.programs.run import Level, run_program
from tests.unit.scoring.traces import left_of, marker

ROOT = Path(__file__).parents[3]
HEADERS = {0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), 1: Path("/usr/include/asm-generic/unistd.h")}
NO_NAMESPACES = ("kernel", "def unshare(", "def unshare(_):\n    raise OSError('none here')\ndef _(")
NO_FILTER = ("system_calls", "def is_known(", "_MACHINES = {}\ndef is_known(")
NO_KERNEL = ("kernel", "import ctypes", "raise ImportError('none here')\nimport ctypes")
NO_CELL = ("keeper", "def _keep(", "def _keep(_):\n    raise OSError('none here')\ndef _(")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _chosen.cache_clear()
    yield
    _chosen.cache_clear()


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cell, to be changed, in use."""
    shutil.copytree(ROOT / "common" / "scoring" / "programs" / "cell", tmp_path / "cell")
    monkeypatch.setattr(programs, "_CELL", tmp_path)
    return tmp_path / "cell"


def change(cell: Path, module: str, old: str, new: str) -> None:
    path = cell / f"{module}.py"
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new, 1))


def needs(level: Level) -> None:
    if why_not(level) is not None:
        pytest.skip(f"this machine has no {level}")


# Which one


def test_programs_run_in_namespaces_where_the_machine_has_them(caplog: pytest.LogCaptureFixture) -> None:
    needs("namespaces")
    problem = {"kind": "code", "entry_point": "f", "inputs": [[1]], "expected": [1]}
    with caplog.at_level(logging.INFO, logger="common.scoring"):
        assert own_results.score(problem, "def f(n): return n")
        assert own_results.score(problem, "def f(n): return n")
    assert isolation() == "namespaces"
    assert [record.message for record in caplog.records] == [
        f"scoring programs by namespaces: {MEANINGS['namespaces']}"
    ]


@pytest.mark.parametrize("missing", [NO_NAMESPACES, NO_KERNEL, NO_CELL], ids=["namespaces", "the kernel's help", "all"])
def test_without_namespaces_programs_are_refused_in_a_sentence_that_says_how_to_allow_them(
    missing: tuple[str, str, str], cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    change(cell, *missing)
    with pytest.raises(ConfigError, match=rf"cannot be confined here \(.*none here\): .* set {SWITCH}=1 to run them"):
        isolation()


def test_what_has_been_allowed_is_a_warning(
    cell: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SWITCH, "1")
    change(cell, *NO_NAMESPACES)
    assert isolation() == "limits" and program_scorer().endswith(", limits")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_machine_that_is_too_busy_for_a_program_can_do_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "TIME_LIMIT_S", 1e-6)
    assert why_not("limits") is None


def test_a_container_that_forbids_namespaces_has_none() -> None:
    """Containers forbid them by a filter of their own."""
    needs("namespaces")
    script = """
from common.scoring.programs.cell import kernel, system_calls
from common.scoring.programs.isolation import isolation
system_calls.REFUSED = {name: system_calls.REFUSED[name] for name in ("unshare", "mount")}
kernel.control(38, 1)
system_calls.install()
print(isolation())
"""
    done = python("-c", script, env={SWITCH: "1"}, timeout=200)
    assert done.stdout.strip() == "limits", done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_root_without_the_right_to_make_namespaces_makes_them_as_a_user() -> None:
    script = "from common.scoring.programs.isolation import why_not\nprint(why_not('namespaces'))"
    command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    if done.stdout.strip() != "None":
        pytest.skip("this machine gives users no namespaces")


# What each is for

LOOK = """
import os, socket, subprocess
def attempt(action, *arguments):
    try: return action(*arguments)
    except Exception as error: return type(error).__name__
def is_refused(action, *arguments):
    return attempt(action, *arguments) in ("PermissionError", "BlockingIOError", "ProcessLookupError")
"""


def test_namespaces_hide_processes_files_and_network() -> None:
    needs("namespaces")
    look = (
        "def f(home, run): return [os.getpid(), os.listdir('/dev'), os.path.exists('/proc/1'), os.path.exists(home), "
    )
    look += "attempt(os.listdir, run), os.getuid() == 0, attempt(open, '/x', 'w'), attempt(open, '/usr/x', 'w')]"
    # The run's folder is there if a library is in it, with nothing else.
    found = run_program(LOOK + look, "f", [[str(Path.home() / ".profile"), str(ROOT / "tests")]], "namespaces")
    assert found is not None
    pid, devices, *rest = found[0]  # type: ignore[misc]
    assert pid == 2 and sorted(devices) == ["full", "null", "random", "urandom", "zero"]
    assert rest == [False, False, "FileNotFoundError", False, "OSError", "OSError"]


def test_the_filter_refuses_processes_signals_and_network() -> None:
    needs("namespaces")
    look = "def f(): return [is_refused(os.fork), is_refused(os.kill, os.getppid(), 0), is_refused(socket.socket), "
    look += "is_refused(os.kill, os.getpid(), 0), is_refused(os.setpriority, 0, 0, 5)]"
    assert run_program(LOOK + look, "f", [[]], "namespaces") == [[True] * 5]


def test_the_filter_knows_the_calls_by_the_kernels_numbers() -> None:
    """aarch64 has the generic ones."""
    calls = {**system_calls.REFUSED, **{name: both for name, (both, _) in system_calls.REFUSED_REQUESTS.items()}}
    calls |= system_calls.LIMITS_OF_ANY_PROCESS
    if not all(path.exists() for path in HEADERS.values()):
        pytest.skip("no headers of the kernel")
    for machine, path in HEADERS.items():
        defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
        for name, numbers in calls.items():
            number = numbers[machine]
            assert number is None or str(number) == defined[name], name


def test_namespaces_have_a_network_of_their_own(cell: Path) -> None:
    needs("namespaces")
    change(cell, *NO_FILTER)  # it refuses sockets anyway
    look = "import socket\ndef f(): return [name for _, name in socket.if_nameindex()]"
    assert run_program(look, "f", [[]], "namespaces") == [["lo"]]


@pytest.mark.skipif(os.geteuid() != 0, reason="others have no privileges to give up")
def test_a_program_of_root_has_no_privileges() -> None:
    needs("namespaces")
    look = "import resource\ndef f(): return [attempt(os.chown, '.', 1, 1), attempt(os.chroot, '/'), "
    look += "attempt(resource.setrlimit, resource.RLIMIT_CPU, (-1, -1))]"
    assert run_program(LOOK + look, "f", [[]], "namespaces") == [["PermissionError", "PermissionError", "ValueError"]]


FORKS = """
import os, signal, time
for number in range(20):
    if not os.fork():
        os.setsid()
        for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
        if not os.fork(): time.sleep(600)
        os._exit(0)
def f(n): return n
"""


def test_what_a_program_starts_dies_with_its_namespace(cell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the filter and the limit, which refuse forks before they come to that."""
    needs("namespaces")
    change(cell, *NO_FILTER)
    limits = programs._limits(programs.TIME_LIMIT_S)
    monkeypatch.setattr(programs, "_limits", lambda _: {**limits, "RLIMIT_NPROC": 1000})
    assert run_program(FORKS, "f", [[1]], "namespaces") == [1]
    assert not left_of(marker(), within_s=60)
    kill = "import os\ndef f(n):\n    try: os.kill(-1, 9)\n    except ProcessLookupError: return 'nobody else is here'"
    assert run_program(kill, "f", [[1]], "namespaces") == ["nobody else is here"]


@pytest.mark.skipif(os.geteuid() != 0, reason="the limit of processes binds users other than root")
def test_limits_end_what_does_not_hide() -> None:
    assert run_program(FORKS.replace("os.setsid()", "pass"), "f", [[1]], "limits") == [1]
    left = left_of(marker(), within_s=60)
    for process in left:
        os.kill(int(str(process)), signal.SIGKILL)
    assert not left
