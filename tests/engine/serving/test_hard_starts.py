"""Starts that are disturbed: closed descriptors, keys from a pipe, signals, a front end that dies early."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.serving.served import ROOT, Served
from tests.engine.serving.storms import children_of

pytestmark = pytest.mark.slow
_COMMAND = [sys.executable, "-m", "common.commands", "serve", "--profile", "cpu", "demo", "--port", "0"]
_LONG_S = 120.0


def started(log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        return subprocess.Popen(
            _COMMAND, cwd=ROOT, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _LONG_S
    while process.poll() is None and not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return "Z" in re.split(r"\) ", Path(f"/proc/{pid}/stat").read_text())[1][:1]
    except OSError:
        return True


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("at once", signal.SIGINT),
        ("with a child", signal.SIGTERM),
        ("with a child", signal.SIGINT),
        ("listening", signal.SIGTERM),
        ("a little later", signal.SIGINT),
        ("much later", signal.SIGTERM),
    ],
)
def test_a_signal_during_the_start_is_one_sentence(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = started(log)
    if moment == "at once":
        time.sleep(0.3)
    else:
        until(lambda: bool(children_of(process.pid)), process)
    children = children_of(process.pid)
    if moment not in ("at once", "with a child"):
        until(lambda: "listening" in log.read_text(), process)
        time.sleep({"listening": 0.0, "a little later": 0.5, "much later": 2.0}[moment])
    process.send_signal(number)
    # 0: it was ready, and has drained. -number: Python itself was starting.
    assert process.wait(_LONG_S) in (128 + number, 0, -number)
    until_gone = time.monotonic() + _LONG_S
    while not all(map(is_gone, children)):
        assert time.monotonic() < until_gone, "a child is left"
        time.sleep(0.05)
    said = [line for line in log.read_text().splitlines() if not re.search("listening on|ready on", line)]
    assert said in ([], [f"lopa: stopped by {number.name}"])


def test_a_front_end_that_dies_while_the_model_loads_is_one_sentence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = started(log)
    until(lambda: bool(children_of(process.pid)), process)
    os.kill(children_of(process.pid)[0], signal.SIGKILL)
    assert process.wait(_LONG_S) == 2
    said = [line for line in log.read_text().splitlines() if "listening on" not in line]
    assert said == ["lopa: the HTTP front end was killed by SIGKILL"]


def test_keys_from_a_pipe_are_read_once(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"first\nsecond\n")
    os.close(writer)
    os.set_inheritable(reader, True)
    server = Served(tmp_path / "log", "--api-key-file", "/dev/stdin", stdin=reader)
    with server:
        os.close(reader)
        statuses = {
            key: server.send("GET", "/v1/models", None, Authorization=f"Bearer {key}")[0]
            for key in ("first", "second", "x")
        }
        assert statuses == {"first": 200, "second": 200, "x": 401}


@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&- 2>&-"])
def test_a_server_whose_descriptors_are_closed_serves(closed: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = " ".join([*_COMMAND[:-1], str(port), closed])
    server = Served(tmp_path / "log")
    server.port = port
    server.log.write_text("")
    server.process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

    def is_ready() -> bool:
        try:
            return server.get("/ready")[0] == 200
        except OSError:
            return False

    try:
        server.wait_for(is_ready, "ready", _LONG_S)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(_LONG_S) == 0


def test_a_run_whose_descriptors_are_closed_leaves_its_records(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    command = " ".join(
        [*_COMMAND[:3], "run", *_COMMAND[4:7], "--set", "input.limit=1", "--set", f"output.path={output}"]
    )
    done = subprocess.run(
        ["bash", "-c", f"exec {command} 0<&- 1>&- 2>&-"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0 and len(output.read_text().splitlines()) == 1
