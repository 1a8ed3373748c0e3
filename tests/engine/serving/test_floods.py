"""What some clients do, and the others do not notice."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.engine.serving.floods import DEAR, OFTEN_ALIVE, flood
from tests.engine.serving.served import Served
from tests.engine.serving.storms import FEW_BRANCHES, children_of, resident_kib

pytestmark = pytest.mark.slow
_SECONDS = float(os.environ.get("LOPA_FLOOD_SECONDS") or 8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("flooded") / "log", *FEW_BRANCHES, *OFTEN_ALIVE) as served:
        yield served
        assert "Traceback" not in served.text


def test_wrong_bodies_and_silent_connections_stall_nobody(server: Served) -> None:
    seen = flood(server, _SECONDS, 2000)
    print(json.dumps(seen))
    assert seen["wrong bodies"] and all(400 <= status < 500 for status in seen["wrong bodies"]), seen
    assert set(seen["others"]["statuses"]) == {"200"}, seen
    for name in ("longest health s", "longest pause s"):
        assert seen["others"][name] - seen["others before"][name] < 0.5, seen
    assert seen["grown by MiB"] < 200 and seen["log bytes"] < 2**20, seen


def test_what_is_dear_to_read_stalls_nobody(server: Served) -> None:
    seen = flood(server, _SECONDS / 2, 0, DEAR)
    print(json.dumps(seen))
    assert set(seen["others"]["statuses"]) == {"200"}, seen
    assert seen["others"]["longest health s"] - seen["others before"]["longest health s"] < 2, seen


def test_no_page_frames_an_answer_or_guesses_its_kind(server: Served) -> None:
    for path in ("/", "/health", "/nowhere"):
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", path)
        headers = connection.getresponse().headers
        connection.close()
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert not [name for name in headers if name.lower().startswith("access-control")]
    assert server.send("GET", "/v1/models", None, Host="rebound.example")[0] == 403


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_closes_its_own_half_gets_its_answer(is_stream: bool, server: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 4, "stream": is_stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert b"HTTP/1.1 200 OK" in answer and (b"[DONE]" if is_stream else b"finish_reason") in answer


def test_half_bodies_take_little_room_and_are_given_up(server: Served) -> None:
    (front_end,) = children_of(server.process.pid)
    before = resident_kib(front_end)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4000000"
    )
    half = [socket.create_connection(("127.0.0.1", server.port), timeout=120) for _ in range(60)]
    statuses = []

    def send(connection: socket.socket) -> None:
        try:
            connection.sendall(head + b"\r\n\r\n" + b'"' + b"a" * 3_900_000)
        except OSError:
            return
        statuses.append(connection.makefile("rb").readline().split()[1])

    threads = [threading.Thread(target=send, args=(connection,)) for connection in half]
    for thread in threads:
        thread.start()
    assert server.get("/health")[0] == 200
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200, "small bodies go through"
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "half a body is waited for"
    assert set(statuses) <= {b"408", b"503"} and b"408" in statuses
    assert resident_kib(front_end) - before < 200 * 1024


def test_more_connections_than_files_do_not_keep_others_out(tmp_path: Path) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))

    with Served(tmp_path / "log", preexec_fn=few_files) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(1100)]
        assert server.get("/health")[0] == 200
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        for connection in silent:
            connection.close()
        assert "208 connections at most" in server.text and "Too many open files" not in server.text
        assert len(server.text) < 10_000


def test_an_engine_that_stands_still_is_told_of_and_streams_are_kept_alive(tmp_path: Path) -> None:
    settings = ("serve.engine_silence_s=3", "serve.keep_alive_s=0.3", *FEW_BRANCHES[1::2])
    with Served(tmp_path / "log", *[word for setting in settings for word in ("--set", setting)]) as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
            body = json.dumps({"prompt": "a", "max_tokens": 4, "stream": True})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200 and answer.readline() == b": keep-alive\n", "before the engine has taken it"
            server.wait_for(lambda: server.get("/health")[0] == 503, "told of")
            for path in ("/health", "/ready"):
                status, text = server.get(path)
                assert status == 503 and "has said nothing for" in text
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 503
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        server.wait_for(lambda: server.get("/ready")[0] == 200, "well again")
        assert answer.read().endswith(b"data: [DONE]\n\n")
