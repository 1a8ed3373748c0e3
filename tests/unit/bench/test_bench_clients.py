"""Clients of a server that is measured: what they cannot measure is said, and is no number."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any, cast

import pytest

import common.serving
from common.bench import requests, serving
from common.config import load_profile, load_run
from common.errors import EngineError
from tests.loopback import answering

ORDER = {"prompts": ["a"] * 8, "max_tokens": 5, "num_lookahead": 0, "at_once": 2}


def server(num_answered: int) -> type[BaseHTTPRequestHandler]:
    """Answers so many requests, and refuses the others."""

    class Handler(BaseHTTPRequestHandler):
        left = num_answered

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            Handler.left -= 1
            self.send_response(503 if Handler.left < 0 else 200)
            self.end_headers()
            self.wfile.write(
                b"come again\n\nlater" if Handler.left < 0
                else b'data: {"choices":[1],"usage":{"completion_tokens":5}}\n\n'
            )  # fmt: skip

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_a_request_that_is_refused_is_the_loads_end() -> None:
    with answering(server(8)) as url:
        assert serving._asked(ORDER, port_of(url))["tokens_per_s"] > 0
    with answering(server(2)) as url, pytest.raises(EngineError) as failed:
        serving._asked(ORDER, port_of(url))
    assert str(failed.value) == (
        "bench load: clients of 2 requests at once: a request failed: the server answered 503: come again later"
    )


def test_the_server_ends_with_what_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    is_told = threading.Event()
    is_stopped: list[bool] = []

    def fails(port: int) -> None:
        assert is_told.wait(60)
        raise EngineError(f"nothing at {port}")

    def serve(*_: object) -> None:
        before = signal.signal(signal.SIGTERM, lambda *_: is_stopped.append(True))
        is_told.set()
        deadline = time.monotonic() + 60
        while not is_stopped:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, before)

    monkeypatch.setattr(common.serving, "serve", serve)
    monkeypatch.setattr(serving, "_wait_until_ready", fails)
    generator = SimpleNamespace(engine=None, run=load_run("demo"), profile=load_profile("cpu"))
    with pytest.raises(EngineError, match="nothing at 1"):
        serving._with_http(cast("Any", generator), [ORDER], 1)
    assert is_stopped


def test_what_was_never_at_full_load_has_no_step_time() -> None:
    core = SimpleNamespace(scheduler=SimpleNamespace(active=[1]), has_work=True, add_request=lambda _: None)

    def step() -> list[Any]:
        core.has_work = False
        return []

    core.step = step
    generator = cast("Any", SimpleNamespace(decoding=lambda: nullcontext(core)))
    assert requests._decode(generator, [], 2) == {"tps": 0.0, "step_ms": None, "p99_ms": None, "steps": 0}
    core.has_work = True
    assert requests._decode(generator, [], 1)["steps"] == 1
    assert requests._cell(None) == serving._cell(None) == "-"
    assert serving._median_step_ms(cast("Any", SimpleNamespace(passes=[])), 2) is None
