"""The strongest level that works is used and named, and each level does what it is for."""

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
from typing import Any

import pytest

from common.metrics import code_isolation, isolation, programs, scoring
from common.metrics.cell import system_calls
from common.metrics.isolation import MEANINGS, _strongest, works
from common.metrics.programs import LEVELS, Level, run_program
from tests.unit.metrics.traces import left_of, marker

ROOT = Path(__file__).parents[3]
HEADERS = {0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), 1: Path("/usr/include/asm-generic/unistd.h")}
NO_NAMESPACES = ("kernel", "def unshare(", "def unshare(_):\n    raise OSError('none here')\ndef _(")
NO_FILTER = ("system_calls", "def is_known(", "_MACHINES = {}\ndef is_known(")
NO_KERNEL = ("kernel", "import ctypes", "raise ImportError('none here')\nimport ctypes")
NO_CELL = ("keeper", "def _keep(", "def _keep(_):\n    raise OSError('none here')\ndef _(")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _strongest.cache_clear()
    yield
    _strongest.cache_clear()


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cell, to be changed, in use."""
    shutil.copytree(ROOT / "common" / "metrics" / "cell", tmp_path / "cell")
    monkeypatch.setattr(programs, "_CELL", tmp_path)
    return tmp_path / "cell"


def change(cell: Path, module: str, old: str, new: str) -> None:
    path = cell / f"{module}.py"
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new, 1))


def needs(level: Level) -> None:
    if not works(level):
        pytest.skip(f"this machine has no {level}")


# Which one


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ([NO_NAMESPACES], "seccomp"),
        ([NO_NAMESPACES, NO_FILTER], "subreaper"),
        ([NO_KERNEL], "limits"),
        ([NO_CELL], "limits"),
    ],
    ids=["without namespaces", "nor a filter", "without the kernel's help", "without anything"],
)
def test_the_strongest_level_that_works_is_used(
    missing: list[tuple[str, str, str]], expected: Level, cell: Path
) -> None:
    if expected != "limits":
        needs(expected)
    for part in missing:
        change(cell, *part)
    assert isolation().level == expected


def test_a_machine_that_is_too_busy_for_a_program_can_do_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "TIME_LIMIT_S", 1e-6)
    assert works("limits")


def test_a_container_that_refuses_namespaces_gets_the_next_level() -> None:
    """As containers do: by a filter of their own, which lets everybody install further ones."""
    needs("seccomp")
    script = """
from common.metrics import isolation
from common.metrics.cell import kernel, system_calls
system_calls.REFUSED = {name: system_calls.REFUSED[name] for name in ("unshare", "mount")}
kernel.control(38, 1)
system_calls.install()
print(isolation().level)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "seccomp", done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_root_without_the_right_to_make_namespaces_makes_them_as_a_user() -> None:
    script = "from common.metrics.isolation import works\nprint(works('namespaces'))"
    command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    if done.stdout.strip() != "True":
        pytest.skip("this machine gives users no namespaces")


def test_a_run_says_once_which_it_uses(caplog: pytest.LogCaptureFixture) -> None:
    problem = {"kind": "code", "entry_point": "f", "inputs": [[1]], "expected": [1]}
    with caplog.at_level(logging.INFO, logger="common.metrics"):
        assert scoring.score(problem, "def f(n): return n")
        assert scoring.score(problem, "def f(n): return n")
    assert [record.message for record in caplog.records] == [f"scoring programs by {isolation()}"]
    assert str(isolation()) == f"{isolation().level}: {MEANINGS[isolation().level]}"


def test_a_weak_level_is_a_warning(cell: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(cell, *NO_KERNEL)
    assert isolation().level == "limits"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_metrics_name_it_if_programs_were_scored() -> None:
    accuracy: dict[str, Any] = {"by_kind": {"code": {}, "math": {}}}
    assert code_isolation({"accuracy": accuracy}) == str(isolation())
    assert code_isolation({"accuracy": {"by_kind": {"math": {}}}}) is None
    assert code_isolation({"accuracy": None}) is None


def test_every_level_has_a_meaning() -> None:
    assert tuple(MEANINGS) == LEVELS


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


@pytest.mark.parametrize("level", ["namespaces", "seccomp"])
def test_the_filter_refuses_processes_signals_and_network(level: Level) -> None:
    needs(level)
    look = "def f(): return [is_refused(os.fork), is_refused(os.kill, os.getppid(), 0), is_refused(socket.socket), "
    look += "is_refused(os.kill, os.getpid(), 0), is_refused(os.setpriority, 0, 0, 5)]"
    assert run_program(LOOK + look, "f", [[]], level) == [[True] * 5]


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
@pytest.mark.parametrize("level", ["namespaces", "seccomp", "subreaper"])
def test_a_program_of_root_has_no_privileges(level: Level) -> None:
    needs(level)
    look = "import resource\ndef f(): return [attempt(os.chown, '.', 1, 1), attempt(os.chroot, '/'), "
    look += "attempt(resource.setrlimit, resource.RLIMIT_CPU, (-1, -1))]"
    assert run_program(LOOK + look, "f", [[]], level) == [["PermissionError", "PermissionError", "ValueError"]]


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
def test_what_a_program_starts_is_found_by_the_subreaper() -> None:
    needs("subreaper")
    assert run_program(FORKS, "f", [[1]], "subreaper") == [1]
    assert not left_of(marker(), within_s=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="the limit of processes binds users other than root")
def test_limits_end_what_does_not_hide() -> None:
    assert run_program(FORKS.replace("os.setsid()", "pass"), "f", [[1]], "limits") == [1]
    left = left_of(marker(), within_s=60)
    for process in left:
        os.kill(int(str(process)), signal.SIGKILL)
    assert not left
