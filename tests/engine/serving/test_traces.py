"""Spans of requests at an OpenTelemetry collector of this process, and what becomes of requests where it is none."""

from __future__ import annotations

import json
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from started import lopa

from common.config import ServeConfig, load_run
from common.errors import ConfigError
from common.serving.engine import front
from tests.engine.serving.served import QUESTION, WAIT_S, Served, events_of
from tests.loopback import answering
from tests.ports import free_port

HAS_OTEL = all(map(front.is_installed, front.NEEDED_BY_TRACES))
needs_otel = pytest.mark.skipif(not HAS_OTEL, reason="opentelemetry is not installed: pip install -e '.[otel]'")
BODY = {"prompt": QUESTION.format(12) + "\n", "max_tokens": 64}
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """spans: what has come, each as name, ids and attributes. Replies wait for `release` where `is_held`."""

    def __init__(self) -> None:
        self.spans: queue.Queue[dict[str, Any]] = queue.Queue()
        self.is_held = False
        self.asked, self.release = threading.Event(), threading.Event()
        self.resource: dict[str, Any] = {}
        self.url = ""

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = _plain(of_resource.resource.attributes)
            for span in (span for scope in of_resource.scope_spans for span in scope.spans):
                self.spans.put(
                    {
                        "name": span.name, "trace": span.trace_id.hex(), "parent": span.parent_span_id.hex(),
                        "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        "is_error": span.status.code == 2, **_plain(span.attributes),
                    }
                )  # fmt: skip

    def next(self) -> dict[str, Any]:
        return self.spans.get(timeout=WAIT_S)


def _plain(attributes: Any) -> dict[str, Any]:
    values = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
    return {key: [item.string_value for item in value.values] if hasattr(value, "values") else value
            for key, value in values.items()}  # fmt: skip


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.asked.set()
            if collector.is_held:
                collector.release.wait(WAIT_S)
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with answering(Handler) as url:
        collector.url = f"{url}/v1/traces"
        try:
            yield collector
        finally:
            collector.release.set()


@contextmanager
def serving(log: Path, url: str) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with Served(log, "--otlp-traces-endpoint", url) as served:
            yield served


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def served(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("traced") / "log", collector.url) as server:
        yield server


@pytest.mark.slow
@needs_otel
def test_a_request_is_a_span_that_continues_its_caller_s(served: Served, collector: Collector) -> None:
    parent = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    body = json.dumps({**BODY, "diffusion": {"stats": True}}).encode()
    status, text = served.send("POST", "/v1/completions", body, **parent)
    answer, span = json.loads(text), collector.next()
    assert status == 200
    assert (span["name"], span["trace"], span["parent"]) == ("text_completion demo", TRACE, CALLER)
    told = {key.removeprefix("gen_ai."): value for key, value in span.items() if key.startswith("gen_ai.")}
    assert told["operation.name"] == "text_completion" and told["provider.name"] == "lopa"
    assert told["request.model"] == told["response.model"] == "demo"
    assert told["request.max_tokens"] == 64 and told["request.temperature"] == 0
    assert told["response.id"] == answer["id"]
    assert told["usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert told["response.finish_reasons"] == ["stop"]
    assert 0 <= told["latency.time_in_queue"] <= span["seconds"]
    assert 0 < told["response.time_to_first_chunk"] <= span["seconds"]
    assert span["lopa.passes"] == answer["diffusion"]["forwards"]
    assert span["lopa.tokens_per_pass"] == pytest.approx(answer["diffusion"]["tokens_per_forward"])
    assert collector.resource["service.name"] == "lopa"
    assert not span["is_error"]


@pytest.mark.slow
@needs_otel
def test_every_answer_of_a_call_has_one_also_of_a_stream(served: Served, collector: Collector) -> None:
    chat = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 16, "stream": True}
    status, text = served.send("POST", "/v1/chat/completions", json.dumps({**chat, "n": 2, "temperature": 1}).encode())
    assert status == 200 and events_of(text)[-1] == "[DONE]"
    first, second = collector.next(), collector.next()
    assert first["name"] == second["name"] == "chat demo"
    assert first["gen_ai.response.id"] == second["gen_ai.response.id"]
    assert first["parent"] == ""


@pytest.mark.slow
@needs_otel
@pytest.mark.parametrize("header", ["", "no", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{CALLER}-00"])
def test_a_caller_s_span_that_is_none_is_left_out_and_one_that_is_not_recorded_records_none(
    served: Served, collector: Collector, header: str
) -> None:
    status, _ = served.send("POST", "/v1/completions", json.dumps(BODY).encode(), traceparent=header)
    assert status == 200
    if header.endswith("-00"):
        served.post("/v1/completions", BODY)  # the one that is told of next
    assert collector.next()["parent"] == ""
    assert collector.spans.empty()


@pytest.mark.slow
@needs_otel
def test_a_request_whose_client_goes_has_an_error_and_one_that_is_refused_no_span(
    served: Served, collector: Collector
) -> None:
    assert served.post("/v1/completions", {**BODY, "max_tokens": 10**6})[0] == 400
    connection = HTTPConnection("127.0.0.1", served.port, timeout=WAIT_S)
    body = json.dumps({**BODY, "max_tokens": 192, "stream": True, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while not answer.readline().startswith(b"data: "):
        pass
    with served.standing_still():
        answer.close()
        connection.close()
        served.wait_for(lambda: "given up by its client" in served.text, "rid of the client")
    span = collector.next()
    assert span["is_error"] and span["error.type"] == "client_gone"
    assert "gen_ai.response.finish_reasons" not in span
    assert collector.spans.empty()


@pytest.mark.slow
@needs_otel
def test_a_collector_that_does_not_reply_keeps_no_request_waiting(tmp_path: Path) -> None:
    with collecting() as collector:
        collector.is_held = True
        with serving(tmp_path / "log", collector.url) as served:
            assert served.post("/v1/completions", BODY)[0] == 200
            assert collector.asked.wait(WAIT_S)
            assert [served.post("/v1/completions", BODY)[0] for _ in range(3)] == [200] * 3
            assert collector.spans.empty()
            collector.release.set()
            assert len([collector.next() for _ in range(4)]) == 4


@pytest.mark.slow
@needs_otel
def test_a_collector_that_is_gone_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1/traces"
    with serving(tmp_path / "log", url) as served:
        told = f"no collector takes traces at {url}"
        assert [served.post("/v1/completions", BODY)[0] for _ in range(2)] == [200, 200]
        served.wait_for(lambda: told in served.text, "said that no collector is there")
        assert served.post("/v1/completions", BODY)[0] == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WAIT_S) == 0
        assert served.text.count(told) == 1
        assert "Traceback" not in served.text


def test_without_the_packages_a_server_that_is_to_trace_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "NEEDED_BY_TRACES", ("opentelemetry.absent", "absent.too"))
    front.check_serving(ServeConfig())
    with pytest.raises(ConfigError, match=r"needs opentelemetry-sdk .* pip install -e '\.\[otel\]'"):
        front.check_serving(ServeConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces"))


@pytest.mark.parametrize(
    "address",
    ["http://localhost:4318", "localhost:4317", "grpc://localhost:4317/v1/traces", "http://localhost:99999/v1/traces"],
)
def test_an_address_that_takes_no_http_is_a_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match="such as http://localhost:4318/v1/traces"):
        load_run("demo", [f"serve.otlp_traces_endpoint={address}"])


def test_variables_of_the_sdk_that_it_does_not_take_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = pytest.importorskip("common.serving.http.traces", reason="needs the extra otel").Tracer
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-4")
    with pytest.raises(ConfigError, match=r"^OTEL_BSP_\*: .*; correct or unset these variables"):
        tracer("http://localhost:4318/v1/traces", "m")


def test_the_flag_is_the_setting() -> None:
    run = lopa("serve", "demo", "--otlp-traces-endpoint", "http://x", timeout=WAIT_S)
    assert run.returncode == 2 and "serve.otlp_traces_endpoint" in run.stderr and "Traceback" not in run.stderr
