"""What /metrics tells: vLLM's names for what vLLM has, `lopa_*` for the rest.

What clients see is counted here as it happens. What passes did comes from the engine a few times a second
(`engine_metrics`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from common.serving.http.engine_metrics import LABELS, EngineMetrics
from common.serving.http.engines.client import EngineClient
from common.serving.http.engines.replica import Answer
from common.serving.messages import Ended

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # a name of prometheus_client's, which reads it when it is imported
MetricT = TypeVar("MetricT", Counter, Histogram)
_FIRST_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
)  # fmt: skip
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_FILLS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)


class Metrics:
    """model_name: the label of all that vLLM labels so, beside `engine`, the replica's number."""

    def __init__(self, model_name: str, engine: EngineClient) -> None:
        self._all = CollectorRegistry()
        self._all.register(EngineMetrics(engine, model_name))
        # Several front ends count in files that they share, and each of them tells the sums.
        self._registry = None if SHARED_FOLDER in os.environ else self._all
        if self._registry is None:
            MultiProcessCollector(self._all)  # type: ignore[no-untyped-call]
        self._model_name, self._num_replicas = model_name, len(engine.replicas)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that have ended.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._counter("vllm:request_success", "Requests that have ended.", "finished_reason")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Up to the first final token.", _FIRST_S)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "After the first final tokens, by token.", _TOKEN_S
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Up to the last token.", _REQUEST_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Waiting for room.", _REQUEST_S)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "Being decoded.", _REQUEST_S)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "The first pass.", _REQUEST_S)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "After the first pass.", _REQUEST_S)
        self._prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _LENGTHS)
        self._lengths = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an answer that passes have filled.", _LENGTHS
        )
        self._most = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", _LENGTHS)
        self._fills = self._histogram("lopa_tokens_per_forward", "Positions of a request that a pass filled.", _FILLS)
        self._request_passes = self._counter("lopa_request_forwards", "Passes of requests that have ended.")
        self._lookahead_wins = self._counter("lopa_lookahead_wins", "Passes of ended requests that a lookahead won.")
        self._forced = self._counter(
            "lopa_forced_fills", "Tokens of ended requests that passed no threshold: a block had to fill one."
        )
        self._given_up = self._counter("lopa_requests_given_up", "Requests aborted since their client was gone.")
        self._rejected = Counter(
            "vllm:admission_rejections", "Calls told to come again.", ("model_name", "reason"), registry=self._registry
        )
        self._http = Counter(
            "lopa_http_requests", "HTTP requests by route and status.", ("route", "status"), registry=self._registry
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self._all)

    def first_token(self, answer: Answer, seconds: float) -> None:
        self._of(answer, self._first).observe(seconds)

    def tokens(self, answer: Answer, count: int) -> None:
        """Count tokens that passes have filled."""
        self._of(answer, self._generated).inc(count)

    def ended(self, answer: Answer, ended: Ended, reason: str, seconds: float, after_first_s: float | None) -> None:
        """Count a request. seconds: the whole of it; after_first_s: those after its first tokens."""
        order, num_tokens = answer.order, answer.order.num_filled(ended.num_tokens)
        self._of(answer, self._success, reason).inc()
        self._of(answer, self._prompt_tokens).inc(order.num_prompt_tokens)
        self._of(answer, self._request_passes).inc(ended.num_forwards)
        self._of(answer, self._lookahead_wins).inc(ended.num_lookahead_wins)
        self._of(answer, self._forced).inc(ended.num_forced_fills)
        for histogram, value in (
            (self._prompt_lengths, order.num_prompt_tokens),
            (self._lengths, num_tokens),
            (self._most, order.request.max_tokens or 0),
            (self._e2e, seconds),
            (self._queue, ended.queue_s),
            (self._inference, ended.total_s),
            (self._prefill, ended.prefill_s),
            (self._decode, max(0.0, ended.total_s - ended.prefill_s)),
        ):
            self._of(answer, histogram).observe(value)
        if after_first_s is not None and num_tokens > 1:
            self._of(answer, self._per_token).observe(after_first_s / (num_tokens - 1))
        fills = self._of(answer, self._fills)
        for count in ended.tokens_per_step:
            fills.observe(count)

    def given_up(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._of(answer, self._given_up).inc()

    def rejected(self) -> None:
        self._rejected.labels(self._model_name, "queue_full").inc()

    def http(self, route: str, status: int) -> None:
        self._http.labels(route=route, status=str(status)).inc()

    def _of(self, answer: Answer, metric: MetricT, *values: str) -> MetricT:
        """Return the metric of the replica that an answer comes from."""
        return metric.labels(self._model_name, str(answer.replica), *values)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        counter = Counter(name, about, (*LABELS, *labels), registry=self._registry)
        return counter if labels else self._beginning_at_0(counter)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return self._beginning_at_0(Histogram(name, about, LABELS, buckets=buckets, registry=self._registry))

    def _beginning_at_0(self, metric: MetricT) -> MetricT:
        for replica in range(self._num_replicas):
            metric.labels(self._model_name, str(replica))
        return metric
