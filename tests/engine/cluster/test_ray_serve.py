"""The server on Ray Serve: streams, clients that go, replicas that die, come and go, and the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from typing import Any

import pytest

from common.cluster import build_app
from common.config import load_profile, load_run
from common.generate import build_generator
from tests.engine.cluster.rayed import WAIT_S, a_cluster, kill_one, needs_ray, wait_for
from tests.engine.serving.served import send
from tests.ports import free_port

pytestmark = [pytest.mark.slow, needs_ray]
QUESTION = "Tom has {} apples and buys 5 more. How many apples does he have now?\n"
SETTINGS = ["max_num_requests=2", "serve.drain_timeout_s=60"]


class App:
    """The application `lopa` at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def run(self, **args: Any) -> None:
        from ray import serve

        wanted = {"profile": "cpu", "run": "demo", "set": SETTINGS, "upscale_delay_s": 1, "downscale_delay_s": 1}
        serve.run(build_app({**wanted, **args}), name="lopa", route_prefix="/")

    def asked(self, body: dict[str, Any]) -> tuple[int, Any]:
        return send(self.port, "POST", "/v1/completions", json.dumps(body).encode(), wait_s=WAIT_S)

    def text(self, apples: int) -> str:
        status, body = self.asked({"prompt": QUESTION.format(apples), "max_tokens": 96})
        assert status == 200, body
        return str(json.loads(body)["choices"][0]["text"])

    def metric(self, name: str) -> float:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def num_running(self) -> int:
        from ray import serve

        states = serve.status().applications["lopa"].deployments["lopa"].replica_states
        return states.get("RUNNING", 0)


class Stream:
    """A stream that is being read."""

    def __init__(self, port: int, **body: Any) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        wanted = {"prompt": QUESTION.format(12), "max_tokens": 96, "stream": True, **body}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(wanted), headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def event(self) -> str | None:
        """The next event's data; None at the end."""
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                return line.removeprefix(b"data: ").decode().strip()
        return None

    def rest(self) -> list[str]:
        return list(iter(self.event, None))

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    from ray import serve

    port = free_port()
    with a_cluster():
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        served = App(port)
        served.run()
        yield served
        serve.shutdown()


@pytest.fixture(scope="module")
def wanted() -> str:
    """The text of `lopa run` and `lopa serve`."""
    with build_generator(load_profile("cpu"), load_run("demo")) as generator:
        return generator.complete(QUESTION.format(12), max_tokens=96)[0]


def test_a_stream_comes_through_the_proxy_part_by_part(app: App, wanted: str) -> None:
    stream = Stream(app.port)
    events = stream.rest()
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(parts) == wanted == app.text(12)
    assert len([part for part in parts if part]) > 1


def test_a_client_that_goes_after_the_first_part_ends_its_request(app: App) -> None:
    before = app.metric("lopa_requests_given_up_total")
    streams = [Stream(app.port, ignore_eos=True, max_tokens=192) for _ in range(2)]
    for stream in streams:
        stream.event()
        stream.close()
    wait_for(lambda: app.metric("lopa_requests_given_up_total") > before, "the engine is told", 60)
    wait_for(lambda: app.metric("vllm:num_requests_running") == 0, "nothing is decoded for nobody", 60)


@pytest.mark.parametrize("named", ["ray::ServeReplica:lopa:lopa", "common.cluster.engine"])
def test_a_killed_replica_is_replaced(app: App, wanted: str, named: str) -> None:
    """Kills its actor, or its engine, after which the actor ends itself."""
    killed = kill_one(named)

    def answers() -> bool:
        try:
            status, body = app.asked({"prompt": QUESTION.format(12), "max_tokens": 96})
        except (OSError, HTTPException):
            return False
        assert status in (200, 500, 503), body
        return status == 200 and json.loads(body)["choices"][0]["text"] == wanted

    wait_for(answers, f"answers after process {killed} was killed")


def test_replicas_come_with_requests_and_go_without_and_the_last_streams_end_whole(app: App, wanted: str) -> None:
    from ray import serve

    app.run(max_replicas=2)
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            app.text(12)

    clients = [threading.Thread(target=ask) for _ in range(5)]
    for client in clients:
        client.start()
    try:
        wait_for(lambda: app.num_running() == 2, "a second replica under load")
    finally:
        is_over.set()
        for client in clients:
            client.join()
    wait_for(lambda: app.num_running() == 1, "one replica without load")
    stream = Stream(app.port)
    first = stream.event()
    ending = threading.Thread(target=serve.delete, args=("lopa",))
    ending.start()
    events = [str(first), *stream.rest()]
    ending.join()
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == wanted
