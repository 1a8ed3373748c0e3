"""What the dashboard asks for is what /metrics tells."""

from __future__ import annotations

import json
import re
from pathlib import Path

from common.config import DecodeConfig
from common.decoding import GenerationRequest
from common.serving.http.engines.client import EngineClient
from common.serving.http.engines.replica import Answer
from common.serving.http.metrics import Metrics
from common.serving.http.orders import Order
from common.serving.messages import Ended

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
