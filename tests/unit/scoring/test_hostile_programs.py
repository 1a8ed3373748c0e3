"""Programs that try to harm the run that scores them: each is wrong soon, and nothing of it stays.

Every program runs in namespaces where the machine has them; with LOPA_SLOW=1 also by limits that promise to hold it.
"""

from __future__ import annotations

import resource
import time
from typing import NamedTuple

import pytest

from common.scoring import own_results
from common.scoring.programs import run as programs
from common.scoring.programs.isolation import MEANINGS, why_not
from common.scoring.programs.run import Level
from tests.unit.scoring.traces import left_of, marker

MOST_MEMORY_MIB = 32
MOST_SECONDS = 120  # the programs have one; a disk that is busy takes a while to drop 5,000 folders


class Hostile(NamedTuple):
    body: str
    least: Level = "limits"  # the weakest level that promises to hold it, as root too


PRELUDE = """
import ctypes, fcntl, json, mmap, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def quietly(action, *arguments):
    try:
        return action(*arguments)
    except BaseException:
        return None
def detach():
    if os.fork():
        os.wait()
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    return True
def sleep():
    while True:
        time.sleep(600)
"""
HOSTILE = {
    # Time
    "loop": Hostile("def f(n):\n    while True: pass"),
    "sleep": Hostile("def f(n): sleep()"),
    "sleep before anything is asked": Hostile("sleep()"),
    "loop deaf to all signals": Hostile(
        "for s in range(1, 65): quietly(signal.signal, s, signal.SIG_IGN)\ndef f(n):\n    while True: pass"
    ),
    "sleep in a session of its own": Hostile("os.setsid()\ndef f(n): sleep()"),
    "sleep with all signals blocked": Hostile(
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ndef f(n): sleep()"
    ),
    "long arithmetic that nothing interrupts": Hostile("def f(n): return 9 ** (9 ** 9)"),
    "long sum": Hostile("def f(n): return sum(range(10 ** 13))"),
    "regular expression that never ends": Hostile("import re\ndef f(n): return re.match('(a+)+$', 'a' * 64 + 'b')"),
    "stop itself": Hostile("signal.alarm(0)\nquietly(os.kill, os.getpid(), signal.SIGSTOP)\ndef f(n): sleep()"),
    "answer, then stay": Hostile("def f(n):\n    os.write(3, b'[1, 2]')\n    sleep()"),
    "refuse to be deleted": Hostile("class A:\n    def __del__(self): sleep()\na = A()\ndel a\ndef f(n): return n"),
    "catch every exception": Hostile(
        "def f(n):\n    while True:\n        try: raise KeyboardInterrupt\n        except BaseException: pass"
    ),
    "endless text for a result": Hostile("def f(n):\n    while True: os.write(3, b' ')"),
    "open a pipe that nobody writes to": Hostile("os.mkfifo('p')\ndef f(n): return open('p').read()"),
    # What the parent reads
    "result 980 lists deep": Hostile("def f(n):\n    r = []\n    for _ in range(980): r = [r]\n    return r"),
    "result 60,000 lists deep": Hostile("def f(n):\n    os.write(3, b'[' * 60000)\n    os._exit(0)"),
    "result of 30,000 closed lists": Hostile("def f(n):\n    os.write(3, b'['*30000 + b']'*30000)\n    os._exit(0)"),
    "result 30,000 objects deep": Hostile("def f(n):\n    os.write(3, b'{\"\":' * 15000)\n    os._exit(0)"),
    "result that holds itself": Hostile("def f(n):\n    r = []\n    r.append(r)\n    return r"),
    "result of a gigabyte": Hostile("def f(n): return 'x' * 2**28"),
    "huge integer": Hostile("def f(n): return 10 ** 100000"),
    "huge integer as text": Hostile("def f(n):\n    os.write(3, b'[' + b'9' * 60000 + b']')\n    os._exit(0)"),
    "huge exponent": Hostile("def f(n):\n    os.write(3, b'[1e999999, -1e999999]')\n    os._exit(0)"),
    "not a number": Hostile("def f(n): return float('nan')"),
    "infinity": Hostile("def f(n): return float('inf')"),
    "bad UTF-8": Hostile("def f(n):\n    os.write(3, bytes(range(128, 256)) * 100)\n    os._exit(0)"),
    "half a surrogate pair": Hostile("def f(n): return '\\ud800'"),
    "a null byte": Hostile("def f(n):\n    os.write(3, b'[1\\0, 2]')\n    os._exit(0)"),
    "something else than a list": Hostile("def f(n):\n    os.write(3, b'{\"0\": 1}')\n    os._exit(0)"),
    "two results": Hostile("def f(n):\n    os.write(3, b'[1, 2]')\n    return n"),
    "a gigabyte into each descriptor": Hostile(
        "def f(n):\n    while True:\n        for d in range(64): quietly(os.write, d, bytes(2**20))"
    ),
    "gigabytes into the results": Hostile("def f(n):\n    while True: os.write(3, bytes(2**22))"),
    "gigabytes onto standard output": Hostile("def f(n):\n    while True: print('x' * 2**20, flush=True)"),
    "gigabytes by the descriptors of /proc": Hostile(
        "def f(n):\n    while True:\n        for d in range(8):\n"
        "            quietly(lambda: os.write(os.open(f'/proc/self/fd/{d}', os.O_WRONLY), bytes(2**20)))"
    ),
    "results that do not block": Hostile("def f(n):\n    os.set_blocking(3, False)\n    return 'x' * 60000"),
    "close everything": Hostile("os.closerange(0, 256)\ndef f(n): return n"),
    "close everything and stay": Hostile("os.closerange(0, 256)\ndef f(n): sleep()"),
    "leave without a word": Hostile("def f(n): os._exit(0)"),
    "leave with 3": Hostile("def f(n): os._exit(3)"),
    "leave politely": Hostile("def f(n): sys.exit(0)"),
    "junk around the result": Hostile("def f(n):\n    os.write(3, b'junk')\n    return n"),
    # Forgery
    "equal to everything": Hostile("class A(int):\n    def __eq__(s, o): return True\ndef f(n): return A(7)"),
    "truth for one": Hostile("def f(n): return True if n == 1 else n"),
    "a float for an integer": Hostile("def f(n): return float(n)"),
    "text for a number": Hostile("def f(n): return str(n)"),
    "an encoder that lies": Hostile("json.dumps = lambda *a, **k: '[true, true]'\ndef f(n): return n"),
    "no function": Hostile("f = 7"),
    "a function that is none": Hostile("def __getattr__(n): return n"),
    # Memory
    "memory": Hostile("def f(n):\n    r = []\n    while True: r.append(bytearray(2**24))"),
    "shared memory": Hostile(
        "def f(n):\n    r = []\n    while True:\n"
        "        r.append(mmap.mmap(-1, 2**26))\n        r[-1].write(bytes(2**26))"
    ),
    "files in memory": Hostile(
        "def f(n):\n    while True:\n        d = os.memfd_create('m')\n        while True: os.write(d, bytes(2**20))"
    ),
    "System V memory": Hostile(
        "def f(n):\n    i = libc.shmget(0, 2**26, 0o1600)\n    assert i < 0\n    sleep()", least="namespaces"
    ),
    "locked memory": Hostile("def f(n):\n    assert libc.mlockall(3) == 0\n    return bytes(2**27)"),
    "raise the limits": Hostile(
        "for l in (resource.RLIMIT_AS, resource.RLIMIT_CPU): quietly(resource.setrlimit, l, (-1, -1))\n"
        "def f(n): return bytearray(2**30)"
    ),
    "full pipes": Hostile(
        "def f(n):\n    while True:\n        r, w = os.pipe()\n"
        "        fcntl.fcntl(w, 1031, 2**20)\n        os.write(w, bytes(2**20))"
    ),
    "unpack a bomb": Hostile(
        "import zlib\ndef f(n):\n    b = zlib.compress(bytes(2**26))\n    r = []\n"
        "    while True: r.append(zlib.decompress(b))"
    ),
    # Crashes
    "stack overflow": Hostile("sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)"),
    "endless recursion": Hostile("def f(n): return f(n + 1)"),
    "segmentation fault": Hostile("def f(n): return ctypes.string_at(0)"),
    "abort": Hostile("def f(n): os.abort()"),
    "core dump": Hostile(
        "quietly(resource.setrlimit, resource.RLIMIT_CORE, (-1, -1))\nlibc.prctl(4, 1, 0, 0, 0)\nctypes.string_at(0)"
    ),
    "source nested too deep": Hostile("eval('(' * 5000 + ')' * 5000)"),
    "source with a null byte": Hostile("x = '\0'\ndef f(n): return 0"),
    "crash of the interpreter's own objects": Hostile("def f(n):\n    ctypes.memset(id(type), 0, 512)\n    return 0"),
    # Files
    "5,000 folders deep": Hostile("def f(n):\n    for _ in range(5000): os.mkdir('d'); os.chdir('d')"),
    "folders as deep as there is time": Hostile("def f(n):\n    while True: os.mkdir('d'); os.chdir('d')"),
    "folders nobody may enter": Hostile(
        "def f(n):\n    for _ in range(200): os.mkdir('d'); os.mkdir('e', 0); os.chdir('d'); os.chmod('.', 0o300)\n"
        "    os.chmod('.', 0)"
    ),
    "many files": Hostile("def f(n):\n    while True: open(str(time.monotonic_ns()), 'w').close()"),
    "many folders with a file": Hostile(
        "def f(n):\n    while True:\n        d = str(time.monotonic_ns())\n"
        "        os.mkdir(d)\n        open(d + '/x', 'w').close()"
    ),
    "large files": Hostile("def f(n):\n    while True: open(str(time.monotonic_ns()), 'wb').write(bytes(2**16))"),
    "no right to its folder": Hostile("def f(n): os.chmod('.', 0)"),
    "delete its folder": Hostile("def f(n): os.rmdir(os.getcwd())"),
    "names that are no text": Hostile("def f(n):\n    for b in range(1, 255): quietly(os.mkdir, bytes([b]) * 200)"),
    "sparse file": Hostile("def f(n): os.truncate(os.open('s', os.O_CREAT | os.O_RDWR), 2**40)"),
    "links in a circle": Hostile("def f(n):\n    os.symlink('..', 'a'); os.symlink('b', 'b'); os.symlink('/', 'c')"),
    # Processes
    "fork and sleep": Hostile("if os.fork() == 0: sleep()\ndef f(n): return 0"),
    "double fork with a session of its own": Hostile("if detach(): sleep()\ndef f(n): return 0", "namespaces"),
    "double fork that floods": Hostile(
        "if detach():\n    while True: os.write(3, bytes(2**20))\ndef f(n): return 0", "namespaces"
    ),
    "a line of forks": Hostile(
        "def f(n):\n    for _ in range(300):\n        if os.fork(): os._exit(0)\n        os.setsid()\n    sleep()",
        "namespaces",
    ),
    "fifty that each ignore signals": Hostile(
        "for _ in range(50):\n    if detach():\n"
        "        for s in range(1, 65): quietly(signal.signal, s, signal.SIG_IGN)\n"
        "        sleep()\ndef f(n): return 0",
        "namespaces",
    ),
    "fork bomb": Hostile("while True: quietly(os.fork)", "namespaces"),
    "fork bomb by clone": Hostile("while True: libc.syscall(56, 17, 0, 0, 0, 0)", "namespaces"),
    "threads without end": Hostile(
        "import threading\ndef f(n):\n    while True: quietly(threading.Thread(target=sleep).start)", "namespaces"
    ),
    "become another program": Hostile("def f(n): os.execv('/bin/sleep', ['sleep', '600'])"),
    "start a shell": Hostile("import subprocess\ndef f(n): return subprocess.Popen('sleep 600 &', shell=True).pid"),
    "kill its parent": Hostile("os.kill(os.getppid(), 9)\ndef f(n): sleep()"),
    "kill its parent from another session": Hostile(
        "os.setsid()\nlibc.prctl(1, 0, 0, 0, 0)\nos.kill(os.getppid(), 9)\ndef f(n): sleep()"
    ),
    "stop its parent": Hostile("quietly(os.kill, os.getppid(), 19)\ndef f(n): return 0"),
    "kill its group": Hostile("os.killpg(0, 9)\ndef f(n): sleep()"),
    "kill everything": Hostile("quietly(os.kill, -1, 9)\ndef f(n): return 0", "namespaces"),
    "kill every ancestor": Hostile(
        "p = os.getppid()\nwhile p > 1:\n    print(quietly(os.kill, p, 9))\n"
        "    p = quietly(lambda: int(open(f'/proc/{p}/stat').read().rsplit(')')[1].split()[1])) or 0\n"
        "def f(n): return 0",
        "namespaces",
    ),
    "kill by a descriptor's owner": Hostile(
        "r, w = os.pipe()\np = os.getppid()\nquietly(fcntl.fcntl, r, 8, p)\nquietly(fcntl.fcntl, r, 10, 9)\n"
        "quietly(fcntl.fcntl, r, fcntl.F_SETFL, fcntl.FASYNC)\nos.write(w, b'x')\ndef f(n): return 0",
        "namespaces",
    ),
    "trace its parent": Hostile("libc.ptrace(16, os.getppid(), 0, 0)\ndef f(n): return 0"),
    "take its parent's processor time": Hostile(
        "quietly(resource.prlimit, os.getppid(), resource.RLIMIT_CPU, (0, 0))\ndef f(n): return 0", "namespaces"
    ),
    "outlive its parent": Hostile("libc.prctl(1, 0, 0, 0, 0)\ndef f(n): sleep()"),
    # The kernel
    "a user namespace with a disk of memory": Hostile(
        "assert libc.unshare(0x10020000) < 0\ndef f(n): return 0", "namespaces"
    ),
    "mount": Hostile("assert libc.mount(b'none', b'/', b'tmpfs', 0, None) < 0\ndef f(n): return 0", "namespaces"),
    "reboot": Hostile("assert libc.reboot(0) < 0\ndef f(n): return 0", "namespaces"),
    "the network": Hostile("def f(n): return socket.create_connection(('1.1.1.1', 53))", "namespaces"),
    "a server": Hostile("def f(n): return socket.create_server(('', 0)).accept()", "namespaces"),
    "queues that stay": Hostile("assert libc.msgget(0, 0o1600) < 0\ndef f(n): return 0", "namespaces"),
}  # fmt: skip


def cases() -> list[object]:
    """The names are the same whatever the machine has: processes that share the tests have to find the same ones."""
    has_none = pytest.mark.skipif(why_not("namespaces") is not None, reason="this machine has no namespaces")
    marks: dict[Level, list[pytest.MarkDecorator]] = {"namespaces": [has_none], "limits": [pytest.mark.slow]}
    return [
        pytest.param(name, level, id=f"{level}: {name}", marks=marks[level])
        for name, hostile in HOSTILE.items()
        for level in MEANINGS
        if level == "namespaces" or hostile.least == "limits"
    ]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "TIME_LIMIT_S", 0.4)


def memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(("name", "level"), cases())
def test_a_hostile_program_is_wrong_soon_and_leaves_nothing(name: str, level: Level, short: None) -> None:
    problem = {"kind": "code", "entry_point": "f", "inputs": [[1], [2]], "expected": [1, 2]}
    memory, began = memory_mib(), time.monotonic()
    assert not own_results.score_code(PRELUDE + HOSTILE[name].body, problem, level)
    assert time.monotonic() - began < MOST_SECONDS
    assert not left_of(marker(), within_s=60)  # a killed process takes a moment to end on a busy machine
    assert memory_mib() - memory < MOST_MEMORY_MIB


def test_the_table_is_long_enough_and_its_prelude_harmless() -> None:
    assert len(HOSTILE) >= 46
    problem = {"kind": "code", "entry_point": "f", "inputs": [[1], [2]], "expected": [1, 2]}
    assert own_results.score_code(PRELUDE + "def f(n): return n", problem)
