"""A program gets what it was promised and no more, at every level of isolation that this machine has."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from started import python

from common.scoring.programs import run as programs
from common.scoring.programs.isolation import MEANINGS, why_not
from common.scoring.programs.run import FILE_LIMIT_BYTES, RESULT_LIMIT_BYTES, Level, NotStarted, run_program
from tests.unit.scoring.traces import folders, left_of, marker, processes

ROOT = Path(__file__).parents[3]
every_level = pytest.mark.parametrize(
    "level",
    [
        pytest.param(level, marks=pytest.mark.skipif(why_not(level) is not None, reason=f"this machine has no {level}"))
        for level in MEANINGS
    ],
)

SOON_S = 60  # on a busy machine; what is not ended stays for longer

FLOOD = "import os\ndef f(n):\n    while True: os.write(3, bytes(2**20))"
HOLD = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        time.sleep(600)
    os._exit(0)
os.wait()
def f(n): return n
"""
SLEEP = "import ctypes, signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
SLEEP += "    except OSError: pass\ndef f(n): time.sleep(600)"


# What is promised to a program


@every_level
def test_results_come_back_in_order_as_json_holds_them(level: Level) -> None:
    source = "def f(a, b=2): print('noise')\ndef f(a, b=2): return [a, (b,), {'k': None}, 1.5, 'ä\\n', True]"
    expected = [[1, [2], {"k": None}, 1.5, "ä\n", True], [3, [4], {"k": None}, 1.5, "ä\n", True]]
    assert run_program(source, "f", [[1], [3, 4]], level) == expected


@every_level
def test_a_program_starts_in_an_empty_folder_that_goes_away(level: Level) -> None:
    source = "import os\nseen = [os.getcwd(), os.listdir()]\nopen('x', 'w').write('y')\ndef f(): return seen"
    found = run_program(source, "f", [[]], level)
    assert found is not None
    folder, names = found[0]  # type: ignore[misc]
    assert names == [] and not (Path(folder) / "x").exists()
    assert not folders(marker())


@every_level
def test_a_program_may_use_the_library_and_the_packages_of_the_run(level: Level) -> None:
    source = "import asyncio, hashlib, numpy, random\ndef f(n):\n    return [asyncio.run(asyncio.sleep(0, n)), "
    source += "hashlib.sha256(b'').hexdigest()[:4], float(numpy.ones((8, 8)).sum()), len(random.sample(range(9), 3))]"
    assert run_program(source, "f", [[7]], level) == [[7, "e3b0", 64.0, 3]]


@every_level
def test_packages_may_lie_behind_links(level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real" / "packages"
    real.mkdir(parents=True)
    (real / "odd_package.py").write_text("value = 5")
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setattr(programs.sysconfig, "get_path", lambda _: str(tmp_path / "link" / "packages"))
    assert run_program("import odd_package\ndef f(): return odd_package.value", "f", [[]], level) == [5]


@every_level
def test_long_programs_inputs_and_results_pass_through(level: Level) -> None:
    source = f"x = {'y' * 300_000!r}\ndef f(t): return [len(x), len(t), 'z' * 60_000]"
    assert run_program(source, "f", [["t" * 300_000]], level) == [[300_000, 300_000, "z" * 60_000]]


@every_level
def test_results_up_to_the_limit_are_read_and_longer_ones_are_none(level: Level) -> None:
    source = "def f(n): return 'x' * n"
    assert run_program(source, "f", [[RESULT_LIMIT_BYTES - 4]], level) == ["x" * (RESULT_LIMIT_BYTES - 4)]
    assert run_program(source, "f", [[RESULT_LIMIT_BYTES - 3]], level) is None


@every_level
def test_memory_and_files_are_limited_and_no_thread_starts(level: Level) -> None:
    source = "def f(n):\n    hog = bytearray(n)\n    return len(hog)"
    assert run_program(source, "f", [[2**20]], level) == [2**20]
    assert run_program(source, "f", [[2**30]], level) is None
    source = "def f(n):\n    with open('x', 'wb') as file: return file.write(bytes(n))"
    assert run_program(source, "f", [[100]], level) == [100]
    assert run_program(source, "f", [[FILE_LIMIT_BYTES + 1]], level) is None


@every_level
def test_a_program_sees_nothing_of_the_run(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its environment nor an open file, nor where it was started."""
    monkeypatch.setenv("SECRET", "x")
    read, write = os.pipe()
    os.set_inheritable(write, True)
    source = """
import os
def is_open(descriptor):
    try: os.fstat(descriptor)
    except OSError: return False
    return True
def f(): return [sorted(os.environ), [d for d in range(64) if is_open(d)], sum(map(os.isatty, range(3)))]
"""
    found = run_program(source, "f", [[]], level)
    os.close(read)
    os.close(write)
    threads = ["MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    # The C library's locale is Python's own doing.
    assert found == [[sorted(["LC_CTYPE", "LOPA_ANSWER", *threads]), [0, 1, 2, 3], 0]]


@pytest.mark.slow  # test_hostile_programs.py has loops at the strongest level
@every_level
@pytest.mark.parametrize("body", ["while True: pass", "import time\n    time.sleep(60)"])
def test_time_is_limited(level: Level, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "TIME_LIMIT_S", 1.0)
    began = time.monotonic()
    assert run_program(f"def f():\n    {body}", "f", [[]], level) is None
    assert 1 <= time.monotonic() - began < SOON_S


# What a run is promised


@every_level
@pytest.mark.parametrize("depth", [970, 980, 990])
def test_results_nested_as_deep_as_the_parser_goes_end_nothing(level: Level, depth: int) -> None:
    source = f"def f():\n    r = 1\n    for _ in range({depth}): r = [r]\n    return r"
    values = run_program(source, "f", [[]], level)
    assert values is None or isinstance(values, list)


@every_level
def test_results_nested_deeper_than_the_parser_goes_are_none(level: Level) -> None:
    source = "import os\ndef f():\n    os.write(3, b'[' * 30000 + b']' * 30000)\n    os._exit(0)"
    assert run_program(source, "f", [[]], level) is None


@pytest.mark.slow
@every_level
def test_a_deep_tree_of_folders_goes_away(level: Level) -> None:
    source = "import os\ndef f():\n    for _ in range(5000): os.mkdir('d'); os.chdir('d')\n    return 5000"
    # The work folder of a namespace has room for fewer.
    assert run_program(source, "f", [[]], level) in ([5000], None)
    assert not left_of(marker(), within_s=SOON_S)


@every_level
def test_a_flood_does_not_fill_the_memory_of_the_run(level: Level) -> None:
    script = "import resource\nfrom common.scoring.programs.run import run_program\n"
    script += "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    script += f"before = most()\nassert run_program({FLOOD!r}, 'f', [[1]], {level!r}) is None\nprint(most() - before)"
    done = python("-c", script, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8 * 1024  # KiB


@every_level
def test_who_holds_the_pipe_does_not_hold_the_run(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "TIME_LIMIT_S", 2.0 * SOON_S)
    began = time.monotonic()
    run_program(HOLD, "f", [[1]], level)
    took_s = time.monotonic() - began
    if level != "limits":
        assert not left_of(marker(), within_s=SOON_S)
    for process in processes(marker()):
        os.kill(process, signal.SIGKILL)
    assert took_s < SOON_S


@every_level
def test_nothing_stays_when_the_run_is_killed_while_it_scores(level: Level) -> None:
    script = "from common.scoring.programs import run as programs\nprograms.TIME_LIMIT_S = 600\n"
    script += f"programs.run_program({SLEEP!r}, 'f', [[1]], {level!r})"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        wait_for_cell(run.pid, 3)
    finally:
        run.kill()
        run.wait()
    assert not left_of(marker(run.pid), within_s=SOON_S)


@pytest.mark.skipif(why_not("namespaces") is not None, reason="this machine has no namespaces")
@pytest.mark.parametrize("place", [0, 1], ids=["keeper", "guard"])
def test_nothing_stays_when_a_keeper_is_killed(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills any process when memory is short."""
    monkeypatch.setattr(programs, "TIME_LIMIT_S", 600.0)
    values: list[object] = ["never set"]
    scoring = threading.Thread(target=lambda: values.append(run_program(SLEEP, "f", [[1]], "namespaces")))
    scoring.start()
    os.kill(wait_for_cell(os.getpid(), 3)[place], signal.SIGKILL)
    scoring.join(60)
    assert values[1:] == [None]
    assert not left_of(marker(), within_s=SOON_S)


@every_level
def test_an_interrupted_run_leaves_nothing(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stop

    monkeypatch.setattr(programs, "TIME_LIMIT_S", 600.0)
    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Thread(target=lambda: (wait_for_cell(os.getpid(), 3), os.kill(os.getpid(), signal.SIGUSR1)))
    timer.start()
    try:
        with pytest.raises(Stop):
            run_program(SLEEP, "f", [[1]], level)
    finally:
        signal.signal(signal.SIGUSR1, before)
    timer.join()
    assert not left_of(marker(), within_s=SOON_S)  # what was killed may still be on its way out


def test_a_cell_that_cannot_be_made_is_told_from_a_program_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.tempfile, "gettempdir", lambda: "/nowhere")
    with pytest.raises(NotStarted, match="/nowhere"):
        run_program("def f(): return 1", "f", [[]], "limits")


def wait_for_cell(run: int, num_processes: int) -> list[int]:
    """The processes of the only cell of a run, parents first, once the program sleeps."""
    ends_at = time.monotonic() + 60
    while time.monotonic() < ends_at:
        found = sorted(processes(marker(run)))
        if len(found) == num_processes and all(state(process) == "S" for process in found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"{processes(marker(run))} instead of {num_processes} processes")


def state(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""
