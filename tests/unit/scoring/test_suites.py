"""A program is right if it passes the assertions after it, and not if it gets around them."""

from __future__ import annotations

import time

import pytest

from common.scoring.programs.suites import passes
from tests.unit.scoring.traces import left_of, marker

TESTS = "def check(f):\n    assert f(1) == 2\n    assert f(-3) == -2\n\ncheck(f)"
SOON_S = 60  # on a busy machine

# Finds in the interpreter's memory what it would have to tell, and tells it.
FORGERY = """
import json, os, re, sys
frame = sys._getframe()
while frame and 'job' not in frame.f_locals:
    frame = frame.f_back
job = frame.f_locals['job']
secret = re.findall(r"return '([0-9a-f]{32})'", job['source'])[-1]
os.write(3, json.dumps([secret]).encode())
os._exit(0)
"""
HOSTILE = {
    "leave politely": "import sys\nsys.exit(0)",
    "leave at once": "import os\nos._exit(0)",
    "leave when asked": "import os\ndef f(n): os._exit(0)",
    "leave by an exception": "def f(n): raise SystemExit(0)",
    "print what looks right": "print('OK')\nprint('[\"passed\"]')\ndef f(n): raise SystemExit",
    "write into the results": "import os\nos.write(3, b'[true]')\nos._exit(0)",
    "read the secret, write it and leave": FORGERY,
    "swallow the assertions in a text": "def f(n): return n + 1\nx = '''",
    "swallow the assertions in a function": "def f(n):\n    return n + 1\ndef g():",
    "swallow what they raise": "def f(n): return 0\ntry:",
    "an assertion error that is none": "import builtins\nbuiltins.AssertionError = SystemExit\ndef f(n): return 0",
    "a trace that skips": "import sys\nsys.settrace(lambda *_: sys.exit(0))\ndef f(n): return n",
    "an exit that lies": "import atexit, os, sys\natexit.register(os._exit, 0)\ndef f(n): sys.exit(0)",
    "too much memory": "x = bytearray(2**30)\ndef f(n): return n + 1",
    "a file that is too large": "open('x', 'wb').write(bytes(2**17))\ndef f(n): return n + 1",
}


def test_a_right_program_passes() -> None:
    assert passes("def f(n):\n    print('noise')\n    return n + 1", TESTS, 60.0)


@pytest.mark.parametrize("program", ["def f(n):\n    return n + 2", "def g(n): return n + 1", "def f(n)\n  return", ""])
def test_a_wrong_program_fails(program: str) -> None:
    assert not passes(program, TESTS, 60.0)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_that_gets_around_the_assertions_fails(name: str) -> None:
    began = time.monotonic()
    assert not passes(HOSTILE[name], TESTS, 5.0)
    assert time.monotonic() - began < SOON_S
    assert not left_of(marker(), within_s=60)


@pytest.mark.parametrize("program", ["def f(n):\n    while True: pass", "import time\ntime.sleep(60)"])
def test_time_is_limited(program: str) -> None:
    began = time.monotonic()
    assert not passes(program, TESTS, 0.5)
    assert time.monotonic() - began < SOON_S


def test_the_network_is_out_of_reach() -> None:
    program = "import socket\ndef f(n):\n    socket.create_connection(('127.0.0.1', 9), 1)\n    return n + 1"
    assert not passes(program, TESTS, 60.0)
