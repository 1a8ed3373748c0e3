"""Two servers behind nginx, by the recipe that is shipped: streams come as they are made, and a server may go."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engine.serving.served import QUESTION, ROOT, WAIT_S, Served, send
from tests.ports import free_port

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


class Routed(NamedTuple):
    servers: list[Served]
    port: int

    def post(self, number: int, **fields: object) -> tuple[int, str]:
        body = {"prompt": QUESTION.format(number) + "\n", "max_tokens": 64, **fields}
        return send(self.port, "POST", "/v1/completions", json.dumps(body).encode())


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Routed]:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Served(tmp_path / f"log{number}", "--set", "serve.keep_alive_s=0.2"))
            for number in (1, 2)
        ]
        port, text = free_port(), (ROOT / "configs/cluster/nginx.conf").read_text()
        for shipped, own in (("127.0.0.1:8001", servers[0].port), ("127.0.0.1:8002", servers[1].port)):
            assert shipped in text
            text = text.replace(shipped, f"127.0.0.1:{own}")
        text, count = re.subn(r"listen 8000;", f"listen 127.0.0.1:{port};", text)
        assert count == 1
        (tmp_path / "nginx.conf").write_text(text)
        command = [NGINX or "", "-p", str(tmp_path), "-c", "nginx.conf"]
        command += ["-g", f"daemon off; pid {tmp_path}/pid;"]
        nginx = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        stack.callback(nginx.wait)
        stack.callback(nginx.terminate)
        made = Routed(servers, port)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert made.post(1)[0] == 200
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield made


def text_of(body: str) -> str:
    return str(json.loads(body)["choices"][0]["text"])


def test_streams_come_as_they_are_made_and_a_lost_server_costs_what_it_was_answering(routed: Routed) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(routed.post, range(10, 26))]
    assert {status for status, _ in answers} == {200}
    ended = [server.metrics()["vllm:e2e_request_latency_seconds_count"] for server in routed.servers]
    assert sum(ended) >= 16 and min(ended) >= 4, ended

    body = {"prompt": QUESTION.format(7), "max_tokens": 64, "stream": True}
    connection = HTTPConnection("127.0.0.1", routed.port, timeout=WAIT_S)
    with routed.servers[0].standing_still(), routed.servers[1].standing_still():
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        stream = connection.getresponse()
        assert stream.readline().startswith(b":"), "it is here while no engine does anything"
    assert stream.read().endswith(b"data: [DONE]\n\n")
    connection.close()

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(routed.post, number) for number in range(10, 26)]
        routed.servers[1].wait_for(lambda: not routed.servers[1].is_empty(), "at work")
        routed.servers[1].process.kill()
        again = [one.result() for one in asked]
    lost = [text for status, text in again if status != 200]
    assert len(lost) <= 8 and all("the engine has ended" in text for text in lost), lost
    for (_, before), (status, after) in zip(answers, again, strict=True):
        assert status != 200 or text_of(before) == text_of(after)
    assert [routed.post(number)[0] for number in range(4)] == [200] * 4


def test_a_server_that_drains_gets_nothing_new_and_nobody_notices(routed: Routed) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(routed.post, number) for number in range(24)]
        routed.servers[0].wait_for(lambda: not routed.servers[0].is_empty(), "at work")
        routed.servers[0].process.terminate()
        assert {one.result()[0] for one in asked} == {200}
    assert routed.servers[0].process.wait(WAIT_S) == 0
