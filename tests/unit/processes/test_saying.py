"""What a process says of what the system refuses, and where its log stands on a full disk."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from started import python
from typer.testing import CliRunner

from common.commands.main import app
from common.errors import what_failed
from common.processes import inform, show

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
    assert (done.returncode, done.stderr) == (2, "lopa: No space left on device; make room, or write elsewhere\n")


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


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "a" * 300),
            f"{'a' * 300}: File name too long; choose a",
        ),
        (
            FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a"),
            "a: No such file or directory; it is not there",
        ),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device; make room"),
        (
            OSError(errno.EIO, os.strerror(errno.EIO), b"a\x1b", None, "b"),
            "a\\x1b to b: Input/output error; name another",
        ),
        (OSError(errno.EIO, os.strerror(errno.EIO), 7), "Input/output error"),
        (OSError("a library's own\nwords"), "a library's own words"),
    ],
)
def test_what_the_system_refuses_is_named_with_its_fix(error: OSError, sentence: str) -> None:
    assert what_failed(error).startswith(sentence)


def test_a_name_too_long_for_any_file_ends_in_the_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "common.commands", "run", "demo", "hi", "--save-run", "x" * 300],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert re.search(r"^lopa: x{300}: File name too long; choose a shorter one, .*\n\Z", done.stderr, re.MULTILINE)


def test_a_line_of_the_log_steers_no_terminal() -> None:
    script = (
        "import logging; from common.processes import log_to_stderr; log_to_stderr(); "
        "logging.error('a\\x1b[2J\\n%s', 'é')"
    )
    said = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=120).stderr
    assert said == "lopa: a\\x1b[2J\né\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_steers_no_terminal_and_is_whole_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    show("a\x1b[2J\n\u3000")
    assert capsys.readouterr().out == ("a\\x1b[2J\n\u3000\n" if is_terminal else "a\x1b[2J\n\u3000\n")


def test_lines_with_names_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    inform("written: a\x1b[2J\n\tb")
    inform("\x9b", err=True)
    assert capsys.readouterr() == ("written: a\\x1b[2J\n\tb\n", "\\x9b\n")


@pytest.mark.parametrize("command", ["bench steps demo", "bench load demo", "bench host", "bench kernels", "tune demo"])
def test_an_argument_that_nobody_knows_steers_no_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--steps", "1", "\x1b[2J\nb"])
    assert done.exit_code == 2 and "\x1b" not in done.stderr and "\\x1b[2J b" in done.stderr.splitlines()[-1]
