"""A minute of the soak, and that its judges find what they are for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.serving.served import ROOT
from tests.soak.asks import COMPLETIONS, Ask, send
from tests.soak.batches import ends_of
from tests.soak.machine import Clock, SmallDisk
from tests.soaking import soaking

_DONE = b"data: [DONE]\n\n"
_ERROR = b'data: {"error": {"message": "replica 1 has ended"}}\n\n'


def event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()


def answer(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (
        status.encode(),
        len(body) if length is None else length,
        body,
    )


def sentence(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


def whole(text: str) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}).encode()


def judged(said: bytes, *, stream: bool, expected: str = "ab") -> str:
    """What the client makes of a server that says this."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection = listening.accept()[0]
            with connection:
                connection.recv(65536)
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        ask = Ask("any", COMPLETIONS, {"prompt": "a", "stream": stream})
        return send(listening.getsockname()[1], ask, (expected,)).what


@pytest.mark.parametrize(
    ("said", "end"),
    [
        (answer(event("a") + event("b") + event("", "stop") + _DONE), "answered"),
        (answer(event("a") + event("c", "stop") + _DONE), "wrong"),
        (answer(event("a") + event("b", "abort") + _DONE), "wrong"),
        (answer(event("a") + _ERROR), "failed"),
        (answer(event("a")), "lost"),
        (answer(event("a"), length=1000), "lost"),
        (answer(event("ab", "stop") + _DONE + _DONE), "doubled"),
        (answer(event("ab", "stop") + event("", "stop") + _DONE), "doubled"),
        (answer(event("ab", "stop") + _DONE + _ERROR), "doubled"),
    ],
)
def test_a_stream_has_one_end(said: bytes, end: str) -> None:
    assert judged(said, stream=True) == end


@pytest.mark.parametrize(
    ("said", "end"),
    [
        (answer(whole("ab")), "answered"),
        (answer(whole("a")), "wrong"),
        (answer(whole("ab")) + answer(whole("ab")), "doubled"),
        (answer(sentence("loading"), "503 Service Unavailable"), "failed"),
        (answer(sentence("no"), "400 Bad Request"), "wrong"),
        (answer(b"Internal error", "500 Internal Server Error"), "wrong"),
        (answer(sentence("Traceback (most recent call last)"), "500 Internal Server Error"), "wrong"),
        (b"", "lost"),
    ],
)
def test_a_whole_answer_is_one(said: bytes, end: str) -> None:
    assert judged(said, stream=False) == end


def test_an_answer_that_is_written_twice_is_counted(tmp_path: Path) -> None:
    records = [
        {"id": 1, "text": "a", "seconds": 0.1},
        {"id": 2, "error": "no"},
        {"id": 1, "text": "a", "seconds": 0.3},
        {"custom_id": "x", "response": {"body": {"choices": [{"text": "b"}]}}},
    ]
    (tmp_path / "o.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert ends_of(tmp_path / "o.jsonl") == ({"1": '"a"', "2": '"no"', "x": '["b"]'}, 1)


@pytest.fixture
def disk(tmp_path: Path) -> SmallDisk:
    made = SmallDisk(tmp_path, "disk")
    if made.why_not is not None:
        pytest.skip(made.why_not)
    return made


def test_a_full_disk_has_no_room_and_then_has(disk: SmallDisk) -> None:
    try:
        with disk.full(), pytest.raises(OSError, match="No space left"), (disk.path / "a").open("wb") as file:
            file.write(b"a" * 10_000)
        (disk.path / "a").write_bytes(b"a" * 10_000)
    finally:
        disk.close()


def test_a_write_waits_for_a_frozen_disk(disk: SmallDisk) -> None:
    try:
        writing = threading.Thread(target=(disk.path / "a").write_text, args=("a",), daemon=True)
        with disk.frozen(0):
            writing.start()
            writing.join(0.3)
            assert writing.is_alive()
        writing.join(60)
        assert (disk.path / "a").read_text() == "a"
    finally:
        disk.close()


def test_a_clock_that_jumps_does_so_for_the_program_alone(tmp_path: Path) -> None:
    clock = Clock(tmp_path, "some")
    clock.jump(86_400)
    program = "import time; print(time.time() - float(input()), time.monotonic() - float(input()))"
    import time

    said = f"{time.time()}\n{time.monotonic()}\n"
    environment = {**os.environ, **clock.environment}
    run = subprocess.run(
        [sys.executable, "-c", program], input=said, env=environment, capture_output=True, text=True, check=True
    )
    wall, monotonic = map(float, run.stdout.split())
    assert 86_400 <= wall < 86_700 and monotonic < 300


def soak(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [str(ROOT / "scripts" / "soak.sh"), *options, "--out", str(out)]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@soaking
def test_a_few_minutes_lose_and_double_nothing_and_leave_nothing(tmp_path: Path) -> None:
    run = soak(tmp_path, "0.06", "--every", "5", "--share", "1")
    said, _ = run.communicate(timeout=1200)
    assert run.returncode == 0, said
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["broken"] == [] and len(found["rounds"]) >= 2
    for part in ("server", "batches"):
        table = found["tables"][part]
        total = dict(zip([name for name, _ in table["columns"]], table["rows"][-1], strict=True))
        assert total["in"] > 20 and total["lost"] == total["doubled"] == total["wrong"] == 0, table


@soaking
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, how: signal.Signals) -> None:
    marked: Callable[[], bytes] = lambda: subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout  # noqa: E731
    run = soak(tmp_path, "1", "--every", "5")
    assert run.stdout is not None
    run.stdout.readline()  # the first round
    assert marked()
    run.send_signal(how)
    run.communicate(timeout=120)
    assert run.returncode and not marked()
    assert json.loads((tmp_path / "soak.json").read_text())["tables"]["server"]["rows"]
