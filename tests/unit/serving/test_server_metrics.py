"""What the dashboard asks for is what /metrics tells, and tokens that a canvas has brought are counted nowhere."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.config import DecodeConfig
from common.decoding import HOLE, GenerationRequest
from common.serving.http.engines.client import EngineClient
from common.serving.http.engines.replica import Answer
from common.serving.http.metrics import Metrics
from common.serving.http.orders import Order, Orders
from common.serving.http.responses.calls import Call
from common.serving.http.responses.whole import num_filled, pass_counts
from common.serving.messages import Accepted, Ended, Tokens
from common.text import AnswerText, Writing

DASHBOARD = Path(__file__).parents[3] / "configs" / "grafana" / "lopa_serve.json"
_NAME = re.compile(r"\b((?:vllm:|lopa_)\w+)")


def exported() -> dict[str, float]:
    """Series by name and labels, of a server that has answered one request."""
    metrics = Metrics("m", EngineClient(0, lambda *_: None, num_replicas=2))
    answer = Answer(Order(0, 0, GenerationRequest("a", (1, 2, 3), max_tokens=8), DecodeConfig()))
    metrics.tokens(answer, 5)
    metrics.first_token(answer, 0.1)
    metrics.given_up([answer])
    metrics.rejected()
    metrics.ended(answer, Ended("a", (), "eos", 5, 2, 1, 1, (2, 3)), "stop", 0.5, 0.1)
    metrics.http("/x", 200)
    lines = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {series: float(value) for series, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_dashboard_asks_for_what_is_there() -> None:
    names = {series.partition("{")[0] for series in exported()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for panel in panels for target in panel["targets"] for name in _NAME.findall(target["expr"])}
    assert len(asked) > 25 and asked <= names, asked - names


def test_labels_that_the_dashboard_groups_by_are_there() -> None:
    text = "\n".join(exported())
    targets = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    found = [re.search(r"sum by \((\w+)\) \(rate\(([\w:]+)", expression) for expression in targets]
    grouped = [(match[2], match[1]) for match in found if match and match[1] != "le"]
    assert grouped and all(re.search(rf"{name}{{[^}}]*{label}=", text) for name, label in grouped), grouped


def test_an_ended_request_is_counted_once() -> None:
    series = exported()
    labels = '{engine="0",model_name="m"}'
    assert series[f"vllm:prompt_tokens_total{labels}"] == 3
    assert series[f"vllm:generation_tokens_total{labels}"] == 5
    assert series[f"lopa_tokens_per_forward_sum{labels}"] == 5
    assert series[f"lopa_tokens_per_forward_count{labels}"] == series[f"lopa_request_forwards_total{labels}"] == 2
    assert series['vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"}'] == 1


CANVAS = (7, 7, HOLE, HOLE, 7, HOLE, 7, 7)
ENDED = Ended("cmpl-a-0", (4, 5, 6, 7, 8), "length", num_tokens=8, num_forwards=2)


@pytest.fixture
def order() -> Order:
    request = GenerationRequest("cmpl-a-0", (5,), max_tokens=len(CANVAS), canvas=CANVAS)
    return Order(0, 0, request, DecodeConfig())


def test_what_is_filled_is_counted_up_to_each_token(order: Order) -> None:
    assert [order.num_filled(length) for length in range(9)] == [0, 0, 0, 1, 2, 2, 3, 3, 3]
    assert (order.num_new(0, 3), order.num_new(3, 5)) == (1, 2)
    assert num_filled([ENDED], [order]) == 3 and pass_counts([ENDED], [order])["tokens_per_forward"] == 1.5


def test_metrics_and_log_tell_what_passes_have_filled(order: Order, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("m", EngineClient(0, lambda *_: None))
    tokenizer = SimpleNamespace(writing=Writing(), decode=lambda ids, skip_special_tokens: "x" * len(ids))
    prompts = SimpleNamespace(answer_text=partial(AnswerText, tokenizer))
    fields = SimpleNamespace(include_stop_str_in_output=False)

    async def answered() -> None:
        answer = Answer(order)
        for message in (Accepted(answer.id), Tokens(answer.id, (1, 2, 3)), ENDED):
            answer.put(message)
        call = Call(
            cast("Any", None), Orders("a", (order,)), *cast("Any", (fields, [answer], prompts)), metrics, "prefix"
        )
        await call.whole()

    with caplog.at_level(logging.INFO):
        asyncio.run(answered())
    assert "1 prompt token, 3 tokens in 2 passes" in caplog.text
    told = metrics.text().decode().splitlines()
    labels = '{engine="0",model_name="m"}'
    for name in ("vllm:generation_tokens_total", "vllm:request_generation_tokens_sum"):
        assert f"{name}{labels} 3.0" in told


def test_a_span_tells_what_passes_have_filled(order: Order) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from common.serving.http.traces import Spans

    sent: list[dict[str, Any]] = []
    tracer = SimpleNamespace(send=lambda spans, answer, attributes: sent.append(attributes))
    Spans(cast("Any", tracer), "cmpl-a", {}).ended(
        cast("Any", SimpleNamespace(order=order, id="a")), ENDED, "stop", None
    )
    assert (sent[0]["gen_ai.usage.output_tokens"], sent[0]["lopa.tokens_per_pass"]) == (3, 1.5)
